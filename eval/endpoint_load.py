"""Loads the endpoint with many streaming clients and checks every token of theirs.

    python -m eval.endpoint_load --workdir=DIR [--clients=64 --max_tokens=64 --json=FILE]

Starts the endpoint of a run on a free port of this machine, asks once alone and then with all
clients at once, and compares each stream with what `Generator` gives for the same prompt and seed.
Prints tokens per second of one client and of all, and the waits for the first token. Needs the
packages of the extras `serve` and `test`. Exit status: 0, 1 a stream differs, 2 wrong flags.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import uvicorn

from eval.endpoint.app import create_app
from eval.endpoint.service import Service
from v41flash.errors import InputError
from v41flash.serving import Generator, Options
from v41flash.serving.engine import Engine

_WORDS = ("def ", "import ", "class ", "for x in ", "return ", "# ", "The ", "A ")


class Answer(NamedTuple):
    """One client's stream.

    Attributes:
        text: of it.
        first: seconds until its first text.
        seconds: until its end.
    """

    text: str
    first: float
    seconds: float


def prompt(number: int) -> str:
    """The prompt of a client."""
    return _WORDS[number % len(_WORDS)] * (1 + number % 5)


async def ask(http: httpx.AsyncClient, number: int, max_tokens: int) -> Answer:
    """Streams one completion."""
    body = {"prompt": prompt(number), "max_tokens": max_tokens, "seed": number, "stream": True}
    started, first, text = time.perf_counter(), None, ""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[len("data: ") :])
            text += event["choices"][0]["text"]
            first = first or time.perf_counter() - started
    return Answer(text, first or 0.0, time.perf_counter() - started)


async def ask_all(address: str, numbers: Sequence[int], max_tokens: int) -> list[Answer]:
    """Streams of all clients at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as http:
        return await asyncio.gather(*(ask(http, number, max_tokens) for number in numbers))


def serve(service: Service) -> tuple[uvicorn.Server, threading.Thread, str]:
    """Starts the endpoint: (server, its thread, its address)."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    return server, thread, f"http://127.0.0.1:{listener.getsockname()[1]}"


def measure(generator: Generator, clients: int, max_tokens: int, context: int) -> dict[str, Any]:
    """Runs the load.

    Returns:
        figures by name; `wrong` lists clients whose stream differs.
    """
    engine = Engine(generator, context=context, waiting=clients)
    server, thread, address = serve(Service(generator, engine, "model"))
    numbers = list(range(clients))
    try:
        # Compiles every shape of the load: prompts of all lengths.
        asyncio.run(ask_all(address, numbers[: len(_WORDS) * 5], max_tokens))
        started = time.perf_counter()
        single = asyncio.run(ask_all(address, [0], max_tokens))
        alone_s = time.perf_counter() - started
        started = time.perf_counter()
        answers = asyncio.run(ask_all(address, numbers, max_tokens))
        together_s = time.perf_counter() - started
    finally:
        server.should_exit = True
        thread.join()
    results = [
        generator.generate([prompt(number)], max_tokens=max_tokens, seed=number)[0]
        for number in numbers
    ]
    wrong = [n for n, (a, r) in enumerate(zip(answers, results, strict=True)) if a.text != r.text]
    tokens = [len(result.tokens) for result in results]
    first = [answer.first for answer in answers]
    return {
        "clients": clients,
        "slots": generator.options.batch_size,
        "tokens": sum(tokens),
        "wrong": wrong,
        "one_client_tokens_per_second": tokens[0] / alone_s,
        "all_clients_tokens_per_second": sum(tokens) / together_s,
        "ratio": (sum(tokens) / together_s) / (tokens[0] / alone_s),
        "one_client_first_text_seconds": single[0].first,
        "first_text_seconds_median": float(np.median(first)),
        "first_text_seconds_worst": float(np.max(first)),
        "peak": engine.counts.peak,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.endpoint_load", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--workdir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=16, help="requests decoded together")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures as JSON")
    values = parser.parse_args(arguments)
    options = Options(batch_size=values.batch_size, steps=values.steps, speculate=False)
    try:
        generator = Generator.from_workdir(values.workdir, options=options)
        figures = measure(generator, values.clients, values.max_tokens, values.context)
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    if values.json:
        values.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
