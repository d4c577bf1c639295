"""What the endpoint compiles before it listens."""

import types

import numpy as np
import pytest

from v41flash.serving.prefill import chunk_width

serve = pytest.importorskip("eval.serve", reason="the extra `serve` is not installed")


class Asked:
    """An engine that notes what it is asked for, and ends it at once."""

    def __init__(self, context, error=None):
        self.context, self.requests, self._error = context, [], error

    def submit(self, request, listener):
        if self.requests and self._error is not None:
            raise self._error
        self.requests.append(request)
        listener(types.SimpleNamespace(finish=None, error=None))
        listener(types.SimpleNamespace(finish="length", error=self._error))


def generator(chunk):
    options = types.SimpleNamespace(chunk=chunk)
    return types.SimpleNamespace(options=options, encode=lambda text: np.array([0, 100], np.int32))


@pytest.mark.parametrize("chunk", [1, 8, 64, 100, 512])
@pytest.mark.parametrize("context", [2, 3, 9, 200, 4096])
def test_every_step_that_a_prompt_can_take_is_run_once(chunk, context, capsys):
    engine = Asked(context)
    serve.warm_up(generator(chunk), engine)
    # Every piece that a prompt with room for two tokens is cut into.
    longest = max(1, min(chunk, context - 2))
    wanted = {chunk_width(length, chunk) for length in range(1, longest + 1)}
    run = [chunk_width(len(request.prompt), chunk) for request in engine.requests]
    assert set(run) == wanted and len(capsys.readouterr().err.splitlines()) == len(run)
    assert all(len(request.prompt) + request.max_tokens <= context for request in engine.requests)
    assert not any(request.share for request in engine.requests)


def test_an_engine_that_stops_ends_it():
    engine = Asked(200, serve.Stopped("the engine is closed"))
    with pytest.raises(serve.Stopped):
        serve.warm_up(generator(64), engine)
