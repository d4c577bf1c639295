"""Minutes of mixed load on the endpoint: clients that stream, vanish, stall or send garbage.

    python -m eval.endpoint_soak --workdir=DIR [--minutes=10 --clients=12 --json=FILE]

Starts the endpoint of a run on a free port of this machine. All the while some clients ask, stream
or whole, and their text is compared with what `Generator` gives for the same prompt and seed;
others close the connection in the middle of a stream, open one and send nothing or half a request,
or send what is no request. Every answer must be the right text or an error of HTTP (4xx), and at
the end every slot must be free, no more threads be alive than before, and plain requests be
answered. Prints counts, waits and memory.
Needs the packages of the extras `serve` and `test`. Exit status: 0, 1 something was wrong, 2 wrong
flags.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from eval.endpoint.service import Service
from eval.endpoint_load import ask, prompt, serve
from v41flash.errors import InputError
from v41flash.serving import Generator, Options
from v41flash.serving.engine import Engine

_PROMPTS = 16
_GARBAGE = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"prompt": 5}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "max_tokens": 1e99}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": ["a", ' + b'"b", ' * 5000 + b'"c"]}',
    b'{"messages": [{"role": "nobody", "content": "a"}]}',
    b'{"prompt": "' + b"a" * 100_000 + b'"}',
)
_RAW = (
    b"GET / HTTP/1.1\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -4\r\n\r\n",
)
# A client that does not get on in this time counts as a fault.
_PATIENCE = 300.0
# In which the engine must have dropped what nobody listens to.
_SECONDS_TO_END = 30.0


class Soak:
    """The clients, and what they have met.

    Attributes:
        counts: outcomes by name.
        waits: seconds until the first text of a stream.
        faults: one line for everything that must not be.
    """

    def __init__(self, address: str, texts: Sequence[str], max_tokens: int, seed: int):
        """`texts` are what the prompts of `eval.endpoint_load` must give."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.waits: list[float] = []
        self.faults: list[str] = []
        self._address, self._texts, self._max_tokens = address, texts, max_tokens
        self._random = random.Random(seed)
        target = urlsplit(address)
        self._where = target.hostname, target.port

    async def run(self, clients: int, until: float) -> None:
        """Keeps so many clients busy until a time of `time.monotonic`."""
        async with httpx.AsyncClient(base_url=self._address, timeout=_PATIENCE) as http:
            await asyncio.gather(*(self._client(http, until) for _ in range(clients)))

    async def _client(self, http: httpx.AsyncClient, until: float) -> None:
        kinds = (self._whole, self._stream, self._vanish, self._garbage, self._raw, self._stall)
        while time.monotonic() < until:
            kind = self._random.choices(kinds, (3, 4, 3, 2, 1, 1))[0]
            name = kind.__name__.strip("_")
            try:
                await asyncio.wait_for(kind(http), _PATIENCE)
                self.counts[name] += 1
            except (httpx.HTTPError, TimeoutError, OSError) as error:
                self.faults.append(f"{name}: {type(error).__name__}: {error}"[:200])

    def _check(self, number: int, text: str) -> None:
        if text != self._texts[number]:
            self.faults.append(f"prompt {number}: {text!r} is not {self._texts[number]!r}"[:200])

    async def _whole(self, http: httpx.AsyncClient) -> None:
        number = self._random.randrange(_PROMPTS)
        body = {"prompt": prompt(number), "max_tokens": self._max_tokens, "seed": number}
        response = await http.post("/v1/completions", json=body)
        response.raise_for_status()
        self._check(number, response.json()["choices"][0]["text"])

    async def _stream(self, http: httpx.AsyncClient) -> None:
        number = self._random.randrange(_PROMPTS)
        answer = await ask(http, number, self._max_tokens)
        self.waits.append(answer.first)
        self._check(number, answer.text)

    async def _vanish(self, http: httpx.AsyncClient) -> None:
        number, lines = self._random.randrange(_PROMPTS), self._random.randrange(6)
        body = {"prompt": prompt(number), "max_tokens": 4 * self._max_tokens, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                lines -= 1
                if lines < 0:
                    return

    async def _garbage(self, http: httpx.AsyncClient) -> None:
        path = self._random.choice(["/v1/completions", "/v1/chat/completions", "/v1/nothing"])
        body = self._random.choice(_GARBAGE)
        response = await http.post(path, content=body)
        self.counts[f"status {response.status_code}"] += 1
        if not 400 <= response.status_code < 500:
            self.faults.append(f"{path} {body[:40]!r}: status {response.status_code}")

    async def _raw(self, http: httpx.AsyncClient) -> None:
        del http
        reader, writer = await asyncio.open_connection(*self._where)
        writer.write(self._random.choice(_RAW))
        await writer.drain()
        try:
            await asyncio.wait_for(reader.read(4096), 1.0)
        except (TimeoutError, ConnectionError):
            pass  # Said nothing, or hung up on what is no request: both are right.
        writer.close()

    async def _stall(self, http: httpx.AsyncClient) -> None:
        del http
        _, writer = await asyncio.open_connection(*self._where)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 64\r\n\r\n"
        for byte in head + b'{"prompt"':
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        writer.close()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure(
    generator: Generator, *, seconds: float, clients: int, max_tokens: int, context: int, seed: int
) -> dict[str, Any]:
    """Runs the load.

    Returns:
        figures by name; `faults` lists what was wrong.
    """
    texts = [
        generator.generate([prompt(number)], max_tokens=max_tokens, seed=number)[0].text
        for number in range(_PROMPTS)
    ]
    engine = Engine(generator, context=context, waiting=8 * clients)
    server, thread, address = serve(Service(generator, engine, "model"))
    try:
        # Compiles what the load needs, and starts the threads that stay.
        warm = Soak(address, texts, max_tokens, seed)
        asyncio.run(warm.run(clients, time.monotonic() + min(60.0, seconds / 4)))
        soak = Soak(address, texts, max_tokens, seed + 1)
        threads, memory = threading.active_count(), [_resident_bytes()]
        began = time.monotonic()
        for part in range(1, 11):
            asyncio.run(soak.run(clients, began + seconds * part / 10))
            memory.append(_resident_bytes())
        last = Soak(address, texts, max_tokens, seed + 2)
        for number in range(_PROMPTS):
            answer = asyncio.run(_alone(address, number, max_tokens))
            last._check(number, answer.text)
        faults = [*warm.faults, *soak.faults, *last.faults]
        busy = _busy_at_last(engine)
        if busy:
            faults.append(f"{busy} requests run or wait although nobody is left who listens")
        more = threading.active_count() - threads
    finally:
        server.should_exit = True
        thread.join()
    if more > 4:
        faults.append(f"{more} more threads than at the beginning")
    return {
        "seconds": seconds,
        "clients": clients,
        "requests": {name: soak.counts[name] for name in sorted(soak.counts)},
        "first_text_seconds_median": float(np.median(soak.waits)) if soak.waits else None,
        "first_text_seconds_worst": float(np.max(soak.waits)) if soak.waits else None,
        "memory_bytes": memory,
        "threads_more": more,
        "faults": faults,
    }


def _busy_at_last(engine: Engine) -> int:
    """Requests that run or wait; those of clients that have gone get some seconds to end."""
    until = time.monotonic() + _SECONDS_TO_END
    while (busy := sum(engine.load)) and time.monotonic() < until:
        time.sleep(0.1)
    return busy


async def _alone(address: str, number: int, max_tokens: int) -> Any:
    async with httpx.AsyncClient(base_url=address, timeout=_PATIENCE) as http:
        return await ask(http, number, max_tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.endpoint_soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--workdir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=4, help="requests decoded together")
    parser.add_argument("--max_tokens", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures as JSON")
    values = parser.parse_args(arguments)
    options = Options(batch_size=values.batch_size, steps=4, speculate=False)
    try:
        generator = Generator.from_workdir(values.workdir, options=options)
        figures = measure(
            generator,
            seconds=60 * values.minutes,
            clients=values.clients,
            max_tokens=values.max_tokens,
            context=values.context,
            seed=values.seed,
        )
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for name, value in figures.items():
        print(f"{name:28} {value}")
    if values.json:
        values.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
