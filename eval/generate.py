"""Text from a trained checkpoint.

    python -m eval.generate --workdir=DIR --prompt="def main(" [--max_tokens=256 --temperature=0.8]
    python -m eval.generate --workdir=DIR --prompt_file=FILE       # "-" reads standard input
    python -m eval.generate --workdir=DIR --prompt="Why?" --effort=75
    python -m eval.generate --workdir=DIR                          # a conversation, line by line
    python -m eval.generate --workdir=DIR --store=FOLDER           # that goes on where it was left

A prompt is continued as it stands, unless --chat or --effort make it a user's message: --effort
(1 .. 100 or low, high, max) lets the assistant reason first. Without a prompt every line of the
standard input is a message of one conversation. With --store, what has been said before costs no
prefill, in a later process either (--store_gb, --store_hours, --host_gb and --host_minutes bound
what is kept). Standard output gets the text as it comes and nothing else; tokens per second and the
size of the caches go to standard error. Exit status: 0 (also where whoever reads the text stops),
2 the flags or the run folder are wrong, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from absl import flags

from eval import store_flags
from eval.store_flags import StoreFlags
from v41flash import command_line
from v41flash.errors import InputError
from v41flash.serving import Generator, Options, Statistics
from v41flash.text.prompt import PromptEncoder, effort_value, render
from v41flash.text.prompt_reply import parse_reply


class Arguments(NamedTuple):
    """The command line.

    Attributes:
        workdir: of the run.
        step: of the checkpoint, or None.
        prompt: text, or None for a conversation.
        chat: the prompt is a user's message.
        effort: of the reasoning, or None for none.
        system: text before a conversation.
        settings: of `Generator.stream`.
        options: of the generator.
        store: where prefixes are kept.
    """

    workdir: Path
    step: int | None
    prompt: str | None
    chat: bool
    effort: int | None
    system: str
    settings: dict[str, Any]
    options: Options
    store: StoreFlags


def parse(arguments: Sequence[str]) -> Arguments:
    """Reads the command line (without the program).

    Raises:
        InputError: a flag or value that cannot be used, in one line.
    """
    values = flags.FlagValues()
    here = dict(flag_values=values)
    flags.DEFINE_string("workdir", None, "Folder of the run.", **here)
    flags.DEFINE_integer("step", None, "Checkpoint; the newest by default.", **here)
    flags.DEFINE_string("prompt", None, "Text to go on from.", **here)
    flags.DEFINE_string("prompt_file", None, "File with that text; - is standard input.", **here)
    flags.DEFINE_boolean("chat", False, "The prompt is a user's message.", **here)
    flags.DEFINE_string("effort", None, "Reasoning: 1 .. 100, low, high or max.", **here)
    flags.DEFINE_string("system", "", "Text before a conversation.", **here)
    flags.DEFINE_integer("max_tokens", 256, "Tokens to emit at most.", **here)
    flags.DEFINE_float("temperature", 1.0, "0 takes the likeliest token.", **here)
    flags.DEFINE_float("top_p", 1.0, "Share of the likeliest tokens.", **here)
    flags.DEFINE_integer("top_k", 0, "Number of likeliest tokens; 0: all.", **here)
    flags.DEFINE_integer("seed", 0, "Of the draws.", **here)
    flags.DEFINE_multi_string("stop", [], "Text that ends the answer.", **here)
    flags.DEFINE_boolean("exact", False, "Prefill by all layers over all tokens.", **here)
    flags.DEFINE_integer("replay", None, "Tokens of the decoder's replay.", **here)
    flags.DEFINE_boolean("speculate", True, "Use the draft head, if there is one.", **here)
    flags.DEFINE_integer("chunk", Options.chunk, "Prompt tokens per step.", **here)
    store_flags.define(values)
    command_line.read(values, arguments)
    if not values.workdir:
        raise InputError("--workdir is missing: give the folder of the run")
    if values.prompt is not None and values.prompt_file is not None:
        raise InputError("--prompt and --prompt_file exclude each other")
    effort = None
    if values.effort is not None:
        number = values.effort.isdecimal()
        effort = effort_value(int(values.effort) if number else values.effort)
    prompt = values.prompt
    if values.prompt_file is not None:
        prompt = _read(values.prompt_file)
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    return Arguments(
        workdir=Path(values.workdir),
        step=values.step,
        prompt=prompt,
        chat=values.chat or effort is not None,
        effort=effort,
        system=values.system,
        settings={name: values[name].value for name in names},
        options=Options(
            batch_size=1,
            chunk=values.chunk,
            exact=values.exact,
            replay=values.replay,
            speculate=values.speculate,
        ),
        store=store_flags.read(values),
    )


def _read(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompt_file={name}: {error}") from error


class Conversation:
    """Messages so far, and the assistant's answers to them."""

    def __init__(self, generator: Generator, arguments: Arguments):
        """Begins with the system text, if there is one."""
        self._generator, self._arguments = generator, arguments
        self._encoder = PromptEncoder(generator.tokenizer)
        system = arguments.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str, out: TextIO) -> None:
        """Writes the answer to a message as it comes, control strings included."""
        self._messages.append({"role": "user", "content": text})
        effort = self._arguments.effort
        thinking = effort is not None
        pieces = render(self._messages, thinking=thinking, effort=effort or "high")
        tokens = self._encoder.encode(pieces).tokens
        said = _write(self._generator, tokens, self._arguments, out, decode=self._decode)
        reply = parse_reply(said, thinking=thinking)
        self._messages.append({"role": "assistant", "content": reply.answer})

    def _decode(self, ids: Sequence[int]) -> str:
        # The end of the message is no part of its text.
        return self._encoder.decode([i for i in ids if i != self._generator.tokenizer.eos_id])


def _write(
    generator: Generator, prompt: Any, arguments: Arguments, out: TextIO, **keywords: Any
) -> str:
    """Streams a continuation to `out`, a line feed behind it; returns its text."""
    said = []
    for piece in generator.stream([prompt], **arguments.settings, **keywords):
        said.append(piece.text)
        out.write(piece.text)
        out.flush()
    out.write("\n")
    out.flush()
    return "".join(said)


def report(statistics: Statistics) -> str:
    """One line about the work done."""
    s = statistics
    prefill = s.prompt_tokens / max(s.prefill_seconds, 1e-9)
    speed = s.tokens / max(s.decode_seconds, 1e-9)
    drafts = ""
    if s.rounds:
        length = 1 + s.accepted / s.rounds
        drafts = f"; {s.rounds:,} drafts checked, {length:.2f} tokens each"
    store = ""
    if s.store is not None:
        store = (
            f"; store: {s.cached_tokens:,} tokens found, {s.replayed_tokens:,} of them replayed,"
            f" {s.store.written:,} pages written, {s.store.damaged:,} damaged,"
            f" {s.store_bytes_per_token:,.3f} bytes/token on disk"
        )
    return (
        f"prefill {s.prompt_tokens:,} tokens, {s.prefill_seconds:.2f} s ({prefill:,.1f} tokens/s);"
        f" decode {s.tokens:,} tokens, {s.decode_seconds:.2f} s ({speed:,.1f} tokens/s), both with"
        f" compilation; global cache {s.cache_bytes_per_token:,.1f} bytes/token,"
        f" {s.cache_bytes:,} bytes allocated; window rows {s.window_bytes:,} bytes{drafts}{store}"
    )


def run(arguments: Arguments, lines: Iterable[str], out: TextIO) -> Statistics:
    """Generates as the command line says.

    Args:
        arguments: of the command line.
        lines: messages, where there is no prompt.
        out: for the text.
    """
    generator = Generator.from_workdir(
        arguments.workdir,
        step=arguments.step,
        options=arguments.options,
        prefix_store=arguments.store.open(),
    )
    print("the first text waits for programs to be compiled", file=sys.stderr, flush=True)
    if arguments.prompt is not None and not arguments.chat:
        _write(generator, arguments.prompt, arguments, out)
        return generator.statistics
    conversation = Conversation(generator, arguments)
    for line in lines if arguments.prompt is None else [arguments.prompt]:
        if line.strip():
            conversation.answer(line.rstrip("\n"), out)
    return generator.statistics


@command_line.program(__doc__, interrupted="interrupted")
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        statistics = run(parse(arguments), sys.stdin, sys.stdout)
    except BrokenPipeError:
        # Who read the text has seen enough. What is left in the buffer must not be tried again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    print(report(statistics), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
