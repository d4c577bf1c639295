"""From checked bodies to requests of the engine: prompts, images, tools, settings."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eval.endpoint.errors import ApiError
from eval.endpoint.replies import ChatChoice, CompletionChoice
from eval.endpoint.requests import ChatRequest, CompletionRequest, NamedToolChoice
from v41flash.image_files import decode_data_url, from_bytes, to_patches
from v41flash.image_rows import RowImage
from v41flash.serving.engine import Engine, Request
from v41flash.serving.generator import Generator
from v41flash.text.prompt import EncodedPrompt, PromptEncoder, forced_call, images, render, to_text
from v41flash.text.prompt_messages import Piece

# What OpenAI emits where a completion does not say how many tokens.
DEFAULT_COMPLETION_TOKENS = 16
MAX_IMAGES = 8
MAX_ANSWERS = 64
MAX_PIXELS = 1 << 24
# A small file may unfold into many pixels: few are decoded at a time.
_DECODERS = 2


class Job(NamedTuple):
    """One answer to be made: what the engine is asked for, and what makes an answer of it."""

    request: Request
    choice: ChatChoice | CompletionChoice


class Service:
    """One model as the endpoint offers it.

    Attributes:
        engine: that runs it.
        model: its name.
    """

    def __init__(self, generator: Generator, engine: Engine, model: str):
        """`generator` is the engine's."""
        self.engine, self.model = engine, model
        self._generator, self._config = generator, generator.config
        image_id = self._config.image_token_id if self._config.vision else None
        self._encoder = PromptEncoder(generator.tokenizer, image_id)
        self._decoding = threading.BoundedSemaphore(_DECODERS)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError where a request names another model."""
        if name is not None and name != self.model:
            raise ApiError(
                f"there is no model {name!r}, only {self.model!r}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip

    def completions(self, body: CompletionRequest) -> list[Job]:
        """The answers that /v1/completions asks for: `n` of the first prompt, then of the next."""
        self.check_model(body.model)
        decode = self._generator.tokenizer.decode
        seed, jobs = _seed(body.seed), []
        prompts = _prompts(body.prompt)
        self._check_answers(len(prompts) * body.choices, "prompt")
        for prompt in prompts:
            tokens = self._generator.encode(prompt)
            for _ in range(body.choices):
                request = Request(
                    prompt=tokens,
                    max_tokens=body.max_tokens or DEFAULT_COMPLETION_TOKENS,
                    top=body.logprobs or 0,
                    **_settings(body, seed + len(jobs)),
                )
                choice = CompletionChoice(len(jobs), decode, body.logprobs is not None)
                jobs.append(Job(request, choice))
        return jobs

    def chat(self, body: ChatRequest) -> list[Job]:
        """The answers that /v1/chat/completions asks for."""
        self.check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        self._check_answers(body.choices, "n")
        if body.messages and body.messages[-1].get("role") == "assistant":
            last = len(body.messages) - 1
            raise ApiError(
                f"messages[{last}]: the last message must not be the assistant's", param="messages"
            )
        thinking = body.reasoning_effort not in (None, "none")
        tools, said = _tools(body, thinking)
        pieces = render(
            body.messages,
            thinking=thinking,
            effort=body.reasoning_effort if thinking else "high",
            tools=tools,
        )
        prompt, pictures = self._encode((*pieces, *said))
        asked = body.max_completion_tokens or body.max_tokens
        # Nothing said: as much as there is room for.
        limit = asked or max(self.engine.context - len(prompt.tokens), 1)
        seed = _seed(body.seed)
        jobs = []
        for number in range(body.choices):
            request = Request(
                prompt=prompt.tokens,
                max_tokens=limit,
                top=body.top_logprobs or 0,
                decode=self._decode,
                images=pictures,
                **_settings(body, seed + number),
            )
            choice = ChatChoice(
                number, self._encoder.decode,
                thinking=thinking, logprobs=bool(body.logprobs), said=to_text(said),
            )  # fmt: skip
            jobs.append(Job(request, choice))
        return jobs

    def _check_answers(self, number: int, param: str) -> None:
        if number > MAX_ANSWERS:
            raise ApiError(
                f"{number} answers in one request: at most {MAX_ANSWERS}", param=param
            )
        # Before anything is decoded that may have to wait.
        self.engine.check_room(number)

    def _encode(self, pieces: Sequence[Piece]) -> tuple[EncodedPrompt, tuple[RowImage, ...]]:
        pictures = images(pieces)
        if not pictures:
            return self._encoder.encode(pieces), ()
        vision = self._config.vision
        if vision is None:
            raise ApiError("this model takes no images", param="messages", code="unsupported")
        if len(pictures) > MAX_IMAGES:
            raise ApiError(f"{len(pictures)} images: at most {MAX_IMAGES}", param="messages")
        patches = []
        for number, url in enumerate(pictures):
            name = f"image {number}"
            if not isinstance(url, str):
                raise ApiError(f"{name}: must be a data URL", param="messages")
            data = decode_data_url(url, name)
            with self._decoding:
                patches.append(to_patches(vision, from_bytes(data, name, MAX_PIXELS), name))
        prompt = self._encoder.encode(pieces, [patch.plan.span for patch in patches])
        return prompt, tuple(map(RowImage, prompt.image_starts, patches))

    def _decode(self, ids: Sequence[int]) -> str:
        # The end of the message is no part of its text.
        return self._encoder.decode([i for i in ids if i != self._generator.tokenizer.eos_id])


def _prompts(prompt: Any) -> list[str | np.ndarray]:
    """One prompt, or several, of text or ids; empty lists are refused."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        prompt = [prompt]
    if not prompt:
        raise ApiError("prompt: must not be empty", param="prompt")
    ids = [one for one in prompt if not isinstance(one, str)]
    if any(not 0 <= token < 2**31 for one in ids for token in one):
        raise ApiError("prompt: token ids must be 0 or more", param="prompt")
    return [one if isinstance(one, str) else np.array(one, np.int32) for one in prompt]


def _seed(seed: int | None) -> int:
    return secrets.randbelow(2**32) if seed is None else seed


def _settings(body: Any, seed: int) -> dict[str, Any]:
    return dict(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        seed=seed % 2**32,
        stop=body.stops,
    )


def _tools(body: ChatRequest, thinking: bool) -> tuple[list[dict[str, Any]], tuple[Piece, ...]]:
    """(tools to present, what the answer has to begin with)."""
    tools, choice = body.tools or [], body.tool_choice
    if choice in (None, "auto"):
        return tools, ()
    if choice == "none":
        return [], ()
    if not tools:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if thinking:
        raise ApiError(
            "a tool_choice that forces a call needs reasoning_effort to be left out or none",
            param="tool_choice",
        )
    if not isinstance(choice, NamedToolChoice):
        return tools, forced_call()
    name = choice.function.name
    names = [(tool.get("function") or {}).get("name") for tool in tools]
    if name not in names:
        raise ApiError(f"tool_choice names {name!r}, which tools lacks", param="tool_choice")
    return tools, forced_call(name)
