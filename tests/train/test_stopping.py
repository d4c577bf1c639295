"""SIGTERM is a request, a second signal the end; several processes stop together."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import jax
import pytest

from train import stopping

# A process in the background of a script ignores SIGINT, and so do those that it starts.
_WAITS = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from train.stopping import Stop
stop = Stop()
with stop.listening():
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("asked", flush=True)
    {then}
print("listened", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def _asked(then):
    """A process that has got SIGTERM and does something then."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once(second):
    # In one call that never returns to Python, as a compilation does not for minutes: a lock (of
    # zeros: the initial value on Linux) that is taken twice.
    never = (
        "import ctypes; lock = ctypes.create_string_buffer(64); "
        "take = ctypes.CDLL(None).pthread_mutex_lock; take(lock); take(lock)"
    )
    with _asked(never) as process:
        time.sleep(0.1)
        began = time.monotonic()
        process.send_signal(second)
        _, error = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 128 + second
    assert error == "SIGTERM: saving after this step\na second signal: not waiting any longer\n"


def test_afterwards_signals_are_as_before():
    with _asked("") as process:
        assert process.stdout.readline() == "listened\n"
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    assert process.returncode == -signal.SIGTERM


def test_a_request_before_the_first_step():
    stop = stopping.Stop()
    stop.before_anything()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.requested:
            time.sleep(0.001)
    with pytest.raises(stopping.Stopped, match="there is nothing to save"):
        stop.before_anything()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_processes_agree_one_update_later(monkeypatch):
    """Of several processes each reads what all of them said with the update before."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = jax.make_mesh((1,), ("data",))
    one, other = stopping.Stop(), stopping.Stop()
    assert not one.agreed(mesh) and not other.agreed(mesh)
    one.requested = True
    assert not one.agreed(mesh)
    assert one.agreed(mesh)
    assert not other.agreed(mesh)
    # What happens before the first step is theirs to agree on, too.
    one.before_anything()
