"""What code in the sandbox can do, and what it cannot."""

import os
import socket
import time

import pytest

from eval.tasks import sandbox

ISOLATED = sandbox.isolation() == "namespaces"


def test_a_program_reads_and_prints():
    result = sandbox.run("print(int(input()) + 1)", stdin="41\n")
    assert result == sandbox.Result("ok", "42\n", "")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", ""),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("import os; os._exit(1)", ""),
    ],
)
def test_errors(code, error):
    result = sandbox.run(code)
    assert result.status == "error" and result.error.startswith(error)


def test_time_runs_out():
    for code in ("while True: pass", "import time; time.sleep(60)"):
        started = time.monotonic()
        assert sandbox.run(code, seconds=0.5).status == "timeout"
        assert time.monotonic() - started < 20


def test_the_environment_is_clean_and_the_folder_empty(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_USER", "1")
    code = "import os; print('SECRET_OF_THE_USER' in os.environ, os.listdir('.'), os.getcwd())"
    first, second = sandbox.run(code), sandbox.run(code)
    assert first.output.startswith("False [] ")
    folders = [result.output.split()[-1] for result in (first, second)]
    assert folders[0] != folders[1] and not any(os.path.exists(folder) for folder in folders)


def test_long_output_is_cut():
    result = sandbox.run("print('x' * (1 << 22))")
    assert result.status == "ok" and len(result.output) == 1 << 20
    full = sandbox.run("open('big', 'w').write('x' * (1 << 25))")
    assert full.status == "error" and "File too large" in full.error


@pytest.mark.skipif(not ISOLATED, reason="this system allows no user namespaces")
def test_there_is_no_network():
    code = """
import socket
with socket.socket() as server:
    server.settimeout(1)
    try:
        server.connect(("127.0.0.1", {port}))
        print("connected")
    except OSError as error:
        print("no network")
"""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        result = sandbox.run(code.format(port=server.getsockname()[1]))
    assert result.output == "no network\n"


@pytest.mark.skipif(not ISOLATED, reason="this system allows no user namespaces")
def test_nothing_that_it_starts_outlives_it(tmp_path):
    trace = tmp_path / "trace"
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open({str(trace)!r}, "a").write("x")
            time.sleep(0.05)
    os._exit(0)
while not os.path.exists({str(trace)!r}):
    time.sleep(0.05)
"""
    assert sandbox.run(code).status == "ok"
    size = trace.stat().st_size
    assert size > 0
    time.sleep(0.5)
    assert trace.stat().st_size == size
