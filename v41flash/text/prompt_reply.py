"""Reading what a model answers: reasoning, answer and tool calls, whole or as it comes.

The text is that of `PromptEncoder.decode`, from behind the prompt that `render` made up to the
end-of-sentence token: in thinking mode it begins inside the reasoning, which `</think>` ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from v41flash.text.prompt import DSML, END_THINK, ToolCall

_CALLS, _END_CALLS = f"<{DSML} calls>", f"</{DSML} calls>"
_LEAD = "\n\n" + _CALLS
_END_INVOKE, _END_PARAMETER = f"</{DSML} invoke>", f"</{DSML} parameter>"
_INVOKE = re.compile(rf'<{DSML} invoke name="([^"<>\r\n]+)">\s*')
_PARAMETER = re.compile(rf'<{DSML} parameter name="([^"<>\r\n]+)" string="(true|false)">')


class Part(NamedTuple):
    """What a stretch of the output is.

    Attributes:
        kind: "reasoning" or "answer", with `text`; or "call", with `call`.
        text: the next piece of it.
        call: a whole tool call.
    """

    kind: Literal["reasoning", "answer", "call"]
    text: str = ""
    call: ToolCall | None = None


class Reply(NamedTuple):
    """An output taken apart.

    Attributes:
        reasoning: "" in chat mode.
        answer: everything that is neither reasoning nor a well-formed block of calls.
        calls: the tool calls, in order.
    """

    reasoning: str
    answer: str
    calls: tuple[ToolCall, ...]


class ReplyReader:
    """Takes an output apart while it comes; text that may still turn out otherwise is held back.

    A block of calls is read as a whole: one that is not well formed is answer, as it stands.
    """

    def __init__(self, *, thinking: bool):
        """`thinking`: the prompt left the reasoning open."""
        self._state = "reasoning" if thinking else "answer"
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after `text`, in order."""
        self._held += text
        return [part for part in self._read(last=False) if part.text or part.call]

    def close(self) -> list[Part]:
        """The rest, after the last text."""
        parts = [part for part in self._read(last=True) if part.text or part.call]
        self._held = ""
        return parts

    def _read(self, *, last: bool) -> Iterator[Part]:
        while True:
            stops = {
                "reasoning": (END_THINK,),
                "answer": (_LEAD, _CALLS),
                "calls": (_END_CALLS,),
            }[self._state]
            found = [(self._held.find(stop), -len(stop), stop) for stop in stops]
            found = [entry for entry in found if entry[0] >= 0]
            if not found:
                if self._state == "calls":
                    # A block that is never closed is no call.
                    kept = 0 if last else len(self._held)
                else:
                    kept = 0 if last else max(_overlap(self._held, stop) for stop in stops)
                yield Part(self._kind, self._take(len(self._held) - kept))
                return
            place, _, stop = min(found)
            before = self._take(place)
            if self._state == "calls":
                block = before + self._take(len(stop))
                yield from _calls(block)
                self._state = "answer"
                continue
            yield Part(self._kind, before)
            if stop == END_THINK:
                self._take(len(stop))
                self._state = "answer"
            else:
                # The opening stays in front of the block, should it be no call.
                self._state = "calls"

    @property
    def _kind(self) -> Literal["reasoning", "answer"]:
        return "reasoning" if self._state == "reasoning" else "answer"

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def parse_reply(text: str, *, thinking: bool) -> Reply:
    """Takes a whole output apart."""
    reader = ReplyReader(thinking=thinking)
    parts = reader.feed(text) + reader.close()
    texts = {
        kind: "".join(part.text for part in parts if part.kind == kind)
        for kind in ("reasoning", "answer")
    }
    calls = tuple(part.call for part in parts if part.call)
    return Reply(texts["reasoning"], texts["answer"], calls)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _calls(block: str) -> Iterator[Part]:
    """The calls of a whole block, or the block as answer where it is malformed."""
    inside = block[block.index(_CALLS) + len(_CALLS) : -len(_END_CALLS)]
    calls, place = [], _skip_space(inside, 0)
    while place < len(inside):
        opening = _INVOKE.match(inside, place)
        read = _arguments(inside, opening.end()) if opening else None
        if read is None:
            yield Part("answer", block)
            return
        arguments, place = read
        calls.append(ToolCall(opening[1], arguments))
        place = _skip_space(inside, place)
    if not calls:
        yield Part("answer", block)
    for call in calls:
        yield Part("call", call=call)


def _arguments(text: str, place: int) -> tuple[dict, int] | None:
    """(arguments, place behind the invoke element); None where it is malformed."""
    arguments: dict = {}
    while not text.startswith(_END_INVOKE, place):
        opening = _PARAMETER.match(text, place)
        end = text.find(_END_PARAMETER, opening.end()) if opening else -1
        if end < 0 or opening[1] in arguments:
            return None
        value = text[opening.end() : end]
        if opening[2] == "false":
            try:
                value = json.loads(value, parse_constant=_refuse)
            except (ValueError, RecursionError):
                return None
        arguments[opening[1]] = value
        place = _skip_space(text, end + len(_END_PARAMETER))
    return arguments, place + len(_END_INVOKE)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
