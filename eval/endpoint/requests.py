"""Bodies of the endpoint's requests, checked.

Fields that change nothing here (`user`, `metadata`, ..) are ignored, and so are those that are not
offered where they ask for nothing; any other field is refused by name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from eval.endpoint.errors import ApiError
from v41flash.serving.engine import MAX_TOP

MAX_CHOICES = 16
MAX_STOPS = 16
# Of no effect on an answer.
_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
}
# Values that leave out what is not offered.
_NEUTRAL = {
    "parallel_tool_calls": (None, True),
    "prediction": (None,),
    "web_search_options": (None,),
    "verbosity": (None,),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "audio": (None,),
    "functions": (None, []),
    "function_call": (None,),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}

_Stop = Annotated[str, Field(min_length=1)]
_Token = Annotated[int, Field(strict=True)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False


class _Common(BaseModel):
    """What both kinds of completion share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that stop the answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def choices(self) -> int:
        """Answers asked for."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """A stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Common):
    """POST /v1/completions."""

    prompt: str | list[str] | list[_Token] | list[list[_Token]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP, strict=True)] | None = None


class ToolChoiceFunction(BaseModel):
    """The function that must be called."""

    name: str


class NamedToolChoice(BaseModel):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: ToolChoiceFunction


class ChatRequest(_Common):
    """POST /v1/chat/completions; messages and tools are checked by the prompt's encoding."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    # 1 .. 100, "low", "high" or "max"; "none", or nothing: no reasoning.
    reasoning_effort: int | str | None = None


_Body = TypeVar("_Body", bound=_Common)


def read(body: bytes, kind: type[_Body]) -> _Body:
    """The request in a body.

    Raises:
        ApiError: not JSON, a field of the wrong kind or range, or one that is not offered.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise ApiError(f"the body must be a JSON object, not {type(values).__name__}")
    try:
        # JSON may spell half of a character, which no text can hold.
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError("the body spells an unpaired surrogate: not a character") from error
    for name, neutral in _NEUTRAL.items():
        if values.pop(name, None) not in neutral:
            raise ApiError(f"{name} is not supported here", param=name, code="unsupported")
    for name in _IGNORED:
        values.pop(name, None)
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = [str(part) for part in first["loc"]]
        name = path[0] if path else None
        if first["type"] == "extra_forbidden":
            raise ApiError(
                f"{name} is not supported here", param=name, code="unsupported"
            ) from error
        raise ApiError(f"{'.'.join(path)}: {first['msg']}", param=name) from error
    except RecursionError as error:
        raise ApiError("the body is nested too deeply") from error
