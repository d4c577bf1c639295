"""An OpenAI-compatible HTTP endpoint for a trained checkpoint.

    python -m eval.serve --workdir=DIR [--host=127.0.0.1 --port=8000 --batch_size=8]

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "def main(", "max_tokens": 64}'

Chat completions and completions: streaming, log-probabilities, usage, seed, stop texts, reasoning
effort (`reasoning_effort`: 1 .. 100, low, high or max), tools, and images as data URLs where the
model sees. Requests that come together are decoded together (continuous batching); what one gets
does not depend on the others. With --store, prompts that begin alike share their prefill, in later
processes, too (docs/serving.md says what that means for results). The endpoint listens to this
machine alone unless --host says otherwise; an API key is asked for where the environment variable
V41FLASH_API_KEY holds one. It compiles its programs before it listens (--nowarmup: with the first
request, which then waits for them). Needs `pip install 'v41flash[serve]'`. Exit status: 0 stopped,
2 the flags or the run folder are wrong.
"""

from __future__ import annotations

import ipaddress
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvicorn
from absl import flags

from eval import store_flags
from eval.endpoint.app import MAX_BODY_BYTES, Limits, create_app
from eval.endpoint.service import Service
from eval.store_flags import StoreFlags
from v41flash import command_line
from v41flash.errors import InputError
from v41flash.serving import Generator, Options
from v41flash.serving.engine import Engine, Progress, Request, Stopped
from v41flash.serving.prefill import SMALLEST_CHUNK

KEY_VARIABLE = "V41FLASH_API_KEY"
# Running requests get after SIGTERM.
_SECONDS_TO_FINISH = 20


class Arguments(NamedTuple):
    """The command line.

    Attributes:
        workdir: of the run.
        step: of the checkpoint, or None.
        host: address to listen on.
        port: likewise; 0 takes a free one.
        model: name of the model in requests.
        context: tokens of a prompt and its answer at most, or None.
        waiting: requests that may wait.
        max_body_mb: largest request.
        options: of the generator.
        warmup: compile before listening.
        store: where prefixes are kept.
    """

    workdir: Path
    step: int | None
    host: str
    port: int
    model: str
    context: int | None
    waiting: int
    max_body_mb: int
    options: Options
    warmup: bool
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
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.", **here)
    flags.DEFINE_integer("port", 8000, "0: a free one.", 0, 65535, **here)
    flags.DEFINE_string("model", None, "Name in requests; the folder's by default.", **here)
    flags.DEFINE_integer("context", None, "Tokens of a prompt and its answer at most.", **here)
    flags.DEFINE_integer("batch_size", Options.batch_size, "Requests decoded together.", **here)
    flags.DEFINE_integer("steps", 8, "Tokens decoded between two looks at requests.", **here)
    flags.DEFINE_integer("chunk", Options.chunk, "Prompt tokens per step.", **here)
    flags.DEFINE_integer("waiting", 256, "Requests that may wait.", **here)
    flags.DEFINE_integer("max_body_mb", MAX_BODY_BYTES >> 20, "Largest request.", 1, **here)
    flags.DEFINE_boolean("exact", False, "Prefill by all layers over all tokens.", **here)
    flags.DEFINE_boolean("warmup", True, "Compile before listening.", **here)
    store_flags.define(values)
    command_line.read(values, arguments)
    if not values.workdir:
        raise InputError("--workdir is missing: give the folder of the run")
    workdir = Path(values.workdir)
    return Arguments(
        workdir=workdir,
        step=values.step,
        host=values.host,
        port=values.port,
        model=values.model or workdir.resolve().name,
        context=values.context,
        waiting=values.waiting,
        max_body_mb=values.max_body_mb,
        options=Options(
            batch_size=values.batch_size,
            chunk=values.chunk,
            steps=values.steps,
            exact=values.exact,
            speculate=False,
        ),
        warmup=values.warmup,
        store=store_flags.read(values),
    )


def warm_up(generator: Generator, engine: Engine) -> None:
    """Has the engine continue a prompt of each length that a step is compiled for.

    Raises:
        Stopped: the engine has ended.
    """
    longest = max(1, min(generator.options.chunk, engine.context - 2))
    widths = [SMALLEST_CHUNK]
    while widths[-1] < longest:
        widths.append(min(2 * widths[-1], longest))
    for number, width in enumerate(widths, start=1):
        print(
            f"compiling for prompts of {width} tokens, {number} of {len(widths)}",
            file=sys.stderr,
            flush=True,
        )
        done = threading.Event()

        def listen(progress: Progress, done: threading.Event = done) -> None:
            if progress.finish is not None or progress.error is not None:
                done.set()

        prompt = np.resize(generator.encode("a"), min(width, longest))
        # A prefix from the store would leave less to prefill, and nobody asks for these prompts.
        tokens = min(2, engine.context - len(prompt))
        engine.submit(Request(prompt, max_tokens=tokens, share=False), listen)
        done.wait()


def open_to_others(host: str) -> bool:
    """Whether other machines can reach an address."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    server: uvicorn.Server | None = None

    def end() -> None:
        if server is not None:
            server.should_exit = True

    values = parse(arguments)
    generator = Generator.from_workdir(
        values.workdir,
        step=values.step,
        options=values.options,
        prefix_store=values.store.open(),
    )
    engine = Engine(generator, context=values.context, waiting=values.waiting, on_fault=end)
    api_key = os.environ.get(KEY_VARIABLE) or None
    if open_to_others(values.host) and api_key is None:
        print(
            f"warning: {values.host} can be reached by others, and {KEY_VARIABLE} is not set",
            file=sys.stderr,
        )
    limits = Limits(values.max_body_mb << 20, api_key)
    app = create_app(Service(generator, engine, values.model), limits)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=values.host,
            port=values.port,
            log_level="info",
            timeout_graceful_shutdown=_SECONDS_TO_FINISH,
        )
    )
    try:
        if values.warmup:
            warm_up(generator, engine)
        server.run()
    except (KeyboardInterrupt, Stopped):
        # While it compiles; or uvicorn has shut down in order and raises it again.
        pass
    finally:
        engine.close()
    # An address in use, say, or an engine that stopped; the log says why.
    return 0 if server.started and not engine.failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
