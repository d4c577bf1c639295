"""Messages of a conversation, checked: the first half of the chat encoding.

`read_turns` reads messages as the OpenAI API spells them and joins what users and tools say one
after the other. What it cannot read is refused by the message's index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from v41flash.errors import InputError

DSML = "｜DSML｜"
# How an image shows in a rendered text; in ids it is a span of the model's `image_token_id`.
IMAGE = "<｜deepseek_image｜>"
RESULT, END_RESULT = "<tool_result>", "</tool_result>"
BETWEEN = "\n\n"

_KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id", "name"},
}
# In an argument they would end it, or the whole block, for whoever reads the call.
_NOT_IN_ARGUMENTS = (f"</{DSML} parameter>", f"</{DSML} calls>")
_NOT_IN_NAMES = re.compile(r'["<>\r\n]')


class PromptError(InputError):
    """A conversation that cannot be encoded; the text names the message by its index."""

    def __init__(self, text: str):
        """`text` may quote the conversation: what has no UTF-8 form in it is escaped."""
        super().__init__(text.encode(errors="backslashreplace").decode().replace("\n", "\\n"))


class Piece(NamedTuple):
    """A part of a prompt.

    Attributes:
        kind: "text" that somebody wrote, "control" of the encoding, or "image".
        text: what it reads; `IMAGE` for an image.
        image: what the message's part gave: a data URL, a path, bytes, or an opened image.
    """

    kind: Literal["text", "control", "image"]
    text: str
    image: Any = None


class ToolCall(NamedTuple):
    """A call of a tool: its name and its arguments, JSON values by name."""

    name: str
    arguments: dict[str, Any]


class Turn(NamedTuple):
    """A message, or several of one speaker joined; `index` is the first one's."""

    role: str
    index: int
    pieces: tuple[Piece, ...]
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def text_piece(text: str) -> Piece:
    """A piece of ordinary text."""
    return Piece("text", text)


def asks(turn: Turn, number: int) -> bool:
    """Whether the assistant can answer this turn: users' and later system messages."""
    return turn.role == "user" or (turn.role == "system" and number > 0)


def read_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The turns of a conversation, in no checked order yet (`check_order`).

    Raises:
        PromptError: a message that is malformed.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(f"messages: must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise PromptError("messages: must hold at least one message")
    turns: list[Turn] = []
    open_calls: dict[str, int] = {}  # places of the last assistant's calls without result, by id
    results: dict[int, tuple[Piece, ...]] = {}  # of the user turn under way, by the call's place
    parts: list[tuple[Piece, ...]] = []  # what the user says behind them

    def close(index: int) -> None:
        joined: list[Piece] = []
        for part in [*(results[place] for place in sorted(results)), *parts]:
            joined += [text_piece(BETWEEN)] if joined else []
            joined += part
        if results or parts:
            turns.append(Turn("user", index, tuple(joined)))
        parts.clear()
        results.clear()

    first_of_turn = 0
    for index, message in enumerate(messages):
        role = _role(message, index)
        if role in ("user", "tool") and not (results or parts):
            first_of_turn = index
        if role == "tool":
            place = _result_place(message, index, open_calls)
            text = _content(message, index, allow_images=False)
            results[place] = (text_piece(RESULT), *text, text_piece(END_RESULT))
            continue
        _check_answered(open_calls, index)
        if role == "user":
            parts.append(_content(message, index, allow_images=True))
        else:
            close(first_of_turn)
            content = _content(message, index, allow_images=False)
            if role == "system":
                turns.append(Turn("system", index, content))
                continue
            calls, ids = _calls(message, index)
            open_calls = {name: place for place, name in enumerate(ids)}
            reasoning = message.get("reasoning_content") or ""
            if not isinstance(reasoning, str):
                raise PromptError(f"messages[{index}].reasoning_content: must be a text")
            turns.append(Turn("assistant", index, content, reasoning, calls))
    if results:
        _check_answered(open_calls, len(messages))
    close(first_of_turn)
    return turns


def _role(message: Mapping[str, Any], index: int) -> str:
    if not isinstance(message, Mapping):
        raise PromptError(f"messages[{index}]: must be an object, not {type(message).__name__}")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in _KEYS:
        raise PromptError(
            f"messages[{index}].role={message.get('role')!r}: must be one of {', '.join(_KEYS)}"
        )
    # Clients send back empty fields of other kinds of messages; only what says something counts.
    odd = sorted(str(key) for key, value in message.items() if value and key not in _KEYS[role])
    if odd:
        raise PromptError(
            f"messages[{index}].{odd[0]}: a {role} message has {', '.join(sorted(_KEYS[role]))}"
        )
    return role


def _content(message: Mapping[str, Any], index: int, *, allow_images: bool) -> tuple[Piece, ...]:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""
    if isinstance(content, str):
        return (text_piece(content),)
    if not isinstance(content, (list, tuple)):
        raise PromptError(f"messages[{index}].content: must be a text or a list of parts")
    pieces: list[Piece] = []
    for number, part in enumerate(content):
        where = f"messages[{index}].content[{number}]"
        pieces += [text_piece(BETWEEN)] if pieces else []
        pieces.append(_part(part, where))
        if pieces[-1].kind == "image" and not allow_images:
            raise PromptError(f"{where}: images belong in user messages")
    return tuple(pieces)


def _part(part: Any, where: str) -> Piece:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return text_piece(part["text"])
    if kind == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if isinstance(url, str) and url:
            return Piece("image", IMAGE, url)
    if kind == "image" and part.get("image") is not None:
        return Piece("image", IMAGE, part["image"])
    raise PromptError(
        f'{where}: must be {{"type": "text", "text": ..}}, {{"type": "image_url", "image_url": '
        f'{{"url": ..}}}} or {{"type": "image", "image": ..}}'
    )


def _result_place(message: Mapping[str, Any], index: int, open_calls: dict[str, int]) -> int:
    """Takes the call that a result belongs to out of the open ones."""
    if not open_calls:
        raise PromptError(f"messages[{index}]: a tool's result without a call that waits for one")
    name = message.get("tool_call_id")
    if not isinstance(name, str) or name not in open_calls:
        raise PromptError(
            f"messages[{index}].tool_call_id={name!r}: must be one of the calls before it that "
            f"have no result, {', '.join(map(repr, open_calls))}"
        )
    return open_calls.pop(name)


def _check_answered(open_calls: Mapping[str, int], index: int) -> None:
    """Refuses to go on at message number `index` while calls wait for their results."""
    if open_calls:
        raise PromptError(
            f"messages[{index}]: must be the result of a call before it, "
            f"{', '.join(map(repr, open_calls))}"
        )


def _calls(message: Mapping[str, Any], index: int) -> tuple[tuple[ToolCall, ...], list[str]]:
    given = message.get("tool_calls") or ()
    if not isinstance(given, (list, tuple)):
        raise PromptError(f"messages[{index}].tool_calls: must be a list")
    calls, ids = [], []
    for number, call in enumerate(given):
        where = f"messages[{index}].tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise PromptError(f'{where}: must be {{"id": .., "function": {{"name": .., ..}}}}')
        name = checked_name(function.get("name"), f"{where}.function.name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError) as error:
                raise PromptError(f"{where}.function.arguments: not JSON ({error})") from error
        if not isinstance(arguments, Mapping):
            raise PromptError(f"{where}.function.arguments: must be a JSON object")
        for key, value in arguments.items():
            checked_name(key, f"{where}.function.arguments, name of an argument")
            place = f"{where}.function.arguments.{key}"
            text = value if isinstance(value, str) else json_text(value, place)
            for ending in _NOT_IN_ARGUMENTS:
                if ending in text:
                    raise PromptError(f"{place}: holds {ending}")
        calls.append(ToolCall(name, dict(arguments)))
        ids.append(str(call.get("id") or f"{number}"))
    if len(set(ids)) < len(ids):
        raise PromptError(f"messages[{index}].tool_calls: two calls have the same id")
    return tuple(calls), ids


def json_text(value: Any, where: str) -> str:
    """A JSON value as the encoding writes it: `, ` and `: ` between, no escapes but needed ones.

    Raises:
        PromptError: a value that JSON cannot hold.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{where}: {type(value).__name__} is not JSON: {error}") from error


def checked_name(name: Any, where: str) -> str:
    """`name` where it can be that of a tool or of an argument.

    Raises:
        PromptError: it cannot.
    """
    if not isinstance(name, str) or not name or _NOT_IN_NAMES.search(name):
        raise PromptError(f"{where}={name!r}: must be a text without quotes, <, > and line breaks")
    return name


def check_order(turns: Sequence[Turn]) -> None:
    """Refuses turns in an order that the encoding has no place for.

    Raises:
        PromptError: see the text.
    """
    for number, turn in enumerate(turns):
        before = turns[number - 1] if number else None
        if turn.role == "assistant" and (before is None or not asks(before, number - 1)):
            raise PromptError(
                f"messages[{turn.index}]: an assistant message must follow a user's, a tool's, or "
                "a system message that is not the first"
            )
    if not any(asks(turn, number) for number, turn in enumerate(turns)):
        raise PromptError("messages[0]: a conversation must hold a user message")


def check_unicode(pieces: Sequence[Piece], index: int) -> None:
    """Refuses text of message number `index` that has no UTF-8 form.

    Raises:
        PromptError: it has none.
    """
    try:
        "".join(piece.text for piece in pieces).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise PromptError(f"messages[{index}]: not Unicode text ({error.reason})") from error
