"""The chat encoding: conversations to prompt pieces, and pieces to token ids.

    bos [System [effort line] [system text] [tools]] User .. Assistant <think> .. </think> .. eos

A conversation is a list of messages as the OpenAI API spells them. `render` turns it into pieces:
text that somebody wrote, control strings that the encoding puts between, and images. The pieces are
kept apart until `PromptEncoder` makes ids of them, so that a text which spells a control string
stays text. Reading what a model answers is `v41flash.text.prompt_reply`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from v41flash.effort import EFFORTS
from v41flash.text.prompt_messages import (
    BETWEEN,
    DSML,
    IMAGE,
    Piece,
    PromptError,
    ToolCall,
    Turn,
    asks,
    check_order,
    check_unicode,
    checked_name,
    json_text,
    read_turns,
    text_piece,
)
from v41flash.text.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
# Tokens of their own where the tokenizer has them; bos and eos are the tokenizer's, however it
# spells them.
CONTROLS = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML)

EFFORT_LINE = (
    "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
# Our wording; `{tools}` is where one JSON schema a line goes. The strings of the call itself are
# the published ones.
TOOLS_TEMPLATE = f"""## Tools

These tools can be called. A call is a block of this form, which ends the message:

<{DSML} calls>
<{DSML} invoke name="TOOL">
<{DSML} parameter name="NAME" string="true|false">VALUE</{DSML} parameter>
</{DSML} invoke>
</{DSML} calls>

Several tools are several invoke elements, several arguments several parameter elements. \
string="true" goes with a text, which is written as it is; string="false" with anything else, \
which is written as JSON.

Schemas of the tools:

{{tools}}
"""

_CONTROL_SPLIT = re.compile("(" + "|".join(map(re.escape, CONTROLS)) + ")")
_warned: set[str] = set()


class EncodedPrompt(NamedTuple):
    """A prompt in ids.

    Attributes:
        tokens: i32[n].
        image_starts: place of every image's first token, in order.
    """

    tokens: np.ndarray
    image_starts: tuple[int, ...]


def effort_value(effort: int | str) -> int:
    """The number of an effort: 1 .. 100, or one of `EFFORTS` by name.

    Raises:
        PromptError: anything else.
    """
    value = EFFORTS.get(effort) if isinstance(effort, str) else effort
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100:
        raise PromptError(
            f"reasoning effort {effort!r}: must be a whole number 1 .. 100 or one of "
            f"{', '.join(EFFORTS)}"
        )
    return value


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool = True,
    effort: int | str = "high",
    tools: Sequence[Mapping[str, Any]] = (),
    keep_reasoning: bool = False,
    tools_template: str = TOOLS_TEMPLATE,
) -> tuple[Piece, ...]:
    """The pieces of a conversation.

    Roles are system, user, assistant and tool ("developer" is read as system). Contents are texts
    or lists of parts, `{"type": "text", "text": ..}` and, from users, `{"type": "image_url",
    "image_url": {"url": ..}}` or `{"type": "image", "image": ..}`; parts, and messages of users and
    tools that follow each other, are joined by blank lines, results in the order of their calls.
    Unless the last message is the assistant's, the prompt ends where the assistant begins to write.

    Args:
        messages: the conversation.
        thinking: the assistant reasons before it answers.
        effort: see `effort_value`; written down in thinking mode only.
        tools: `{"type": "function", "function": {"name": .., "description": .., "parameters": ..}}`
            each.
        keep_reasoning: keep the reasoning of earlier turns; with tools it is always kept.
        tools_template: the text that presents the tools, with `{tools}` where they go.

    Returns:
        The pieces; neighbours of kind "text" are not joined.

    Raises:
        PromptError: a conversation that has no encoding; names the message by its index.
    """
    effort_line = EFFORT_LINE.format(effort_value(effort)) if thinking else ""
    turns = read_turns(messages)
    presented = _tools_pieces(tools, tools_template) if tools else ()
    keep_reasoning = keep_reasoning or bool(tools)
    if presented and turns[0].role != "system":
        turns.insert(0, Turn("system", 0, ()))
    if presented:
        turns[0] = turns[0]._replace(pieces=(*turns[0].pieces, text_piece(BETWEEN), *presented))
    check_order(turns)

    last_user = max(number for number, turn in enumerate(turns) if asks(turn, number))
    pieces = [_control(BOS)]
    if effort_line or turns[0].role == "system":
        pieces.append(_control(SYSTEM))
    if effort_line:
        pieces.append(text_piece(effort_line))
    for number, turn in enumerate(turns):
        reasons = thinking and (keep_reasoning or number > last_user)
        if turn.role == "assistant":
            own = [_control(ASSISTANT), _control(THINK if reasons else END_THINK)]
            if reasons:
                own += [text_piece(turn.reasoning), _control(END_THINK)]
            own += [*turn.pieces, *_calls_pieces(turn.calls), _control(EOS)]
        else:
            opening = USER if turn.role == "user" else SYSTEM
            own = [_control(opening)] if number or turn.role == "user" else []
            own += turn.pieces
        check_unicode(own, turn.index)
        pieces += own
    if turns[-1].role != "assistant":
        pieces += [_control(ASSISTANT), _control(THINK if thinking else END_THINK)]
    return tuple(piece for piece in pieces if piece.text)


def to_text(pieces: Sequence[Piece]) -> str:
    """What the pieces read, control strings included: for the eye and for tests."""
    return "".join(piece.text for piece in pieces)


def images(pieces: Sequence[Piece]) -> list[Any]:
    """What the parts of the prompt's images gave, in order."""
    return [piece.image for piece in pieces if piece.kind == "image"]


class PromptEncoder:
    """Pieces to ids and back, by one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, image_token_id: int | None = None):
        """Looks up the control strings; those without a token are warned about, once a tokenizer.

        Args:
            tokenizer: any tokenizer.
            image_token_id: the id that stands for every token of an image; None refuses images.
        """
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        ids = {BOS: tokenizer.bos_id, EOS: tokenizer.eos_id}
        added = tokenizer.added_tokens
        ids |= {text: added[text] for text in CONTROLS if text not in ids and text in added}
        self._ids = ids
        self._texts = {token: text for text, token in ids.items()}
        if image_token_id is not None:
            self._texts[image_token_id] = IMAGE
        lacking = [text for text in CONTROLS if text not in ids]
        if lacking and tokenizer.fingerprint not in _warned:
            _warned.add(tokenizer.fingerprint)
            _logger.warning(
                "tokenizer %s has no token for %s: prompts spell them as text",
                tokenizer.name, ", ".join(lacking),
            )  # fmt: skip

    def encode(self, pieces: Sequence[Piece], image_spans: Sequence[int] = ()) -> EncodedPrompt:
        """The ids of a prompt.

        Args:
            pieces: from `render`.
            image_spans: tokens of every image, in order (`v41flash.images.ImagePlan.span`).

        Raises:
            PromptError: not one span for each image, or images without an id for them.
        """
        expected = sum(piece.kind == "image" for piece in pieces)
        if expected != len(image_spans):
            raise PromptError(f"the prompt holds {expected} images, given are {len(image_spans)}")
        if expected and self._image_token_id is None:
            raise PromptError("the prompt holds images, and this model takes none")
        parts: list[np.ndarray] = []
        starts: list[int] = []
        text = ""
        spans = iter(image_spans)
        for piece in (*pieces, None):
            whole = piece is not None and piece.kind == "image"
            token = None if piece is None or piece.kind != "control" else self._ids.get(piece.text)
            if piece is not None and not whole and token is None:
                text += piece.text
                continue
            # What stands between two tokens is encoded in one go, as it would be in one string.
            if text:
                parts.append(self._tokenizer.encode_plain(text))
                text = ""
            if whole:
                starts.append(sum(map(len, parts)))
                parts.append(np.full(next(spans), self._image_token_id, np.int32))
            elif token is not None:
                parts.append(np.array([token], np.int32))
        return EncodedPrompt(np.concatenate(parts or [np.empty(0, np.int32)]), tuple(starts))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, control strings included (`Tokenizer.decode` drops special ones)."""
        out, run = [], []
        for token in map(int, ids):
            if token not in self._texts:
                run.append(token)
                continue
            out += [self._tokenizer.decode(run), self._texts[token]]
            run = []
        return "".join([*out, self._tokenizer.decode(run)])


def _control(text: str) -> Piece:
    return Piece("control", text)


# -- Tools ---------------------------------------------------------------------------------------


def _tools_pieces(tools: Sequence[Mapping[str, Any]], template: str) -> tuple[Piece, ...]:
    schemas = []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise PromptError(
                f'tools[{number}]: must be {{"type": "function", "function": {{..}}}}'
            )
        checked_name(function.get("name"), f"tools[{number}].function.name")
        schemas.append(json_text(dict(function), f"tools[{number}].function"))
    before, marker, after = template.partition("{tools}")
    if not marker:
        raise PromptError("tools_template: must hold {tools}")
    return (*_trusted(before), text_piece("\n".join(schemas)), *_trusted(after))


def _trusted(text: str) -> list[Piece]:
    """Text of the encoding itself: the control strings in it are control strings."""
    return [
        _control(part) if part in CONTROLS else text_piece(part)
        for part in _CONTROL_SPLIT.split(text)
        if part
    ]


def forced_call(name: str | None = None) -> tuple[Piece, ...]:
    """What an answer begins with that has to call a tool: any tool, or the one of this name.

    It goes behind the pieces of a prompt without reasoning; `ReplyReader` is fed its text first.
    """
    pieces = [text_piece(BETWEEN), *_trusted(f"<{DSML} calls>\n<{DSML} invoke name=")]
    return (*pieces, text_piece('"' if name is None else f'"{name}">\n'))


def _calls_pieces(calls: Sequence[ToolCall]) -> list[Piece]:
    if not calls:
        return []
    pieces = [text_piece(BETWEEN), *_trusted(f"<{DSML} calls>\n")]
    for call in calls:
        pieces += [
            *_trusted(f"<{DSML} invoke name="),
            text_piece(f'"{call.name}"'),
            text_piece(">\n"),
        ]
        for number, (name, value) in enumerate(call.arguments.items()):
            is_text = isinstance(value, str)
            pieces += [text_piece("\n")] if number else []
            pieces += _trusted(f"<{DSML} parameter name=")
            pieces.append(text_piece(f'"{name}" string="{str(is_text).lower()}">'))
            text = value if is_text else json_text(value, name)
            pieces.append(text_piece(text))
            pieces += _trusted(f"</{DSML} parameter>")
        pieces += _trusted(f"\n</{DSML} invoke>\n")
    return [*pieces, *_trusted(f"</{DSML} calls>")]
