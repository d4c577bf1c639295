"""What the endpoint answers: OpenAI's objects as dictionaries."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from v41flash.serving.engine import Progress
from v41flash.text.prompt import ToolCall
from v41flash.text.prompt_reply import Part, ReplyReader

Decode = Callable[[Sequence[int]], str]


def new_id(prefix: str) -> str:
    """An identifier that nothing else has."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclasses.dataclass(frozen=True)
class Frame:
    """What every object of one answer carries.

    Attributes:
        id: of the answer.
        kind: its `object`.
        model: name of the model.
        created: seconds since the epoch.
    """

    id: str
    kind: str
    model: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An object with these choices."""
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def token_entry(decode: Decode, token: int, logprob: float) -> dict[str, Any]:
    """One token with its log-probability; bytes where its text says them exactly."""
    text = decode([token])
    exact = "\ufffd" not in text
    return {
        "token": text,
        "logprob": float(logprob),
        "bytes": list(text.encode()) if exact else None,
    }


def chat_logprobs(decode: Decode, progress: Progress) -> list[dict[str, Any]]:
    """`logprobs.content` of new tokens."""
    content = []
    for place, (token, logprob) in enumerate(
        zip(progress.tokens, progress.logprobs, strict=True)
    ):
        likeliest = zip(progress.top_tokens[place], progress.top_logprobs[place], strict=True)
        entry = token_entry(decode, int(token), logprob)
        entry["top_logprobs"] = [token_entry(decode, int(t), p) for t, p in likeliest]
        content.append(entry)
    return content


class CompletionChoice:
    """One answer of /v1/completions, as it comes and as a whole."""

    def __init__(self, index: int, decode: Decode, logprobs: bool):
        """`decode`: token ids to text; `logprobs`: report them."""
        self._index, self._decode, self._report = index, decode, logprobs
        self._offset = 0
        self._text: list[str] = []
        self._logprobs = _no_logprobs()
        self._finish: str | None = None

    def chunks(self, progress: Progress) -> Iterator[dict[str, Any]]:
        """Choices of a stream's next objects."""
        self._text.append(progress.text)
        self._finish = progress.finish
        new = self._entries(progress) if self._report else None
        if progress.text or progress.finish or len(progress.tokens):
            yield self._choice(progress.text, new, progress.finish)

    def whole(self) -> dict[str, Any]:
        """The choice of the whole answer."""
        logprobs = self._logprobs if self._report else None
        return self._choice("".join(self._text), logprobs, self._finish)

    def _choice(self, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _entries(self, progress: Progress) -> dict[str, Any]:
        new = _no_logprobs()
        for place, token in enumerate(map(int, progress.tokens)):
            text = self._decode([token])
            likeliest = zip(progress.top_tokens[place], progress.top_logprobs[place], strict=True)
            new["tokens"].append(text)
            new["token_logprobs"].append(float(progress.logprobs[place]))
            new["top_logprobs"].append({self._decode([int(t)]): float(p) for t, p in likeliest})
            new["text_offset"].append(self._offset)
            self._offset += len(text)
        for name, values in new.items():
            self._logprobs[name] += values
        return new


def _no_logprobs() -> dict[str, list]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class ChatChoice:
    """One answer of /v1/chat/completions, as it comes and as a whole."""

    def __init__(
        self, index: int, decode: Decode, *, thinking: bool, logprobs: bool, said: str = ""
    ):
        """Starts an answer.

        Args:
            index: of the choice.
            decode: token ids to text.
            thinking: the prompt left the reasoning open.
            logprobs: report them.
            said: what the prompt put into the answer's mouth.
        """
        self._index, self._decode, self._report = index, decode, logprobs
        self._reader = ReplyReader(thinking=thinking)
        self._first = self._reader.feed(said) if said else []
        self._texts = {"reasoning": "", "answer": ""}
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._finish: str | None = None
        self._opened = False

    def chunks(self, progress: Progress) -> Iterator[dict[str, Any]]:
        """Choices of a stream's next objects."""
        parts = [*self._first, *self._reader.feed(progress.text)]
        self._first = []
        if progress.finish is not None:
            parts += self._reader.close()
        content = chat_logprobs(self._decode, progress) if self._report else None
        self._logprobs += content or []
        if not self._opened:
            self._opened = True
            yield self._chunk({"role": "assistant", "content": ""})
        deltas = [self._delta(part) for part in parts]
        if content and not deltas:
            deltas = [{}]
        for number, delta in enumerate(deltas):
            own = {"content": content} if content and number == 0 else None
            yield self._chunk(delta, logprobs=own)
        if progress.finish is not None:
            called = self._calls and progress.finish == "stop"
            self._finish = "tool_calls" if called else progress.finish
            yield self._chunk({}, finish=self._finish)

    def whole(self) -> dict[str, Any]:
        """The choice of the whole answer."""
        answer = self._texts["answer"]
        message = {"role": "assistant", "content": answer if answer or not self._calls else None}
        if self._texts["reasoning"]:
            message["reasoning_content"] = self._texts["reasoning"]
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = {"content": self._logprobs} if self._report else None
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish,
        }

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.kind == "call":
            call = tool_call(part.call)
            self._calls.append(call)
            return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}
        self._texts[part.kind] += part.text
        return {{"reasoning": "reasoning_content", "answer": "content"}[part.kind]: part.text}

    def _chunk(
        self, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }


def tool_call(call: ToolCall) -> dict[str, Any]:
    """A call as a message holds it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": new_id("call"), "type": "function", "function": function}

