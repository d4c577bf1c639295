"""configs/small.py on two GPUs of one host against one, at the same global batch.

    python -m tests.train.two_gpus [STEPS [CONFIG LENGTH]]

Each mesh is a process of its own (`tests.train.mesh_losses`): one GPU, then data, fsdp and expert
axes of two. Prints a line for each: median seconds of a step (the first left out), its ratio to one
GPU in the same run, peak memory of a GPU, and the largest relative difference of a loss from one
GPU's; JSON lines of everything go before. Exit status 1 where a loss differs by more than 2 %:
bfloat16 sums in another order, and selections that follow from them. Without GPUs the same runs
on virtual CPU devices: `JAX_PLATFORMS=cpu python -m tests.train.two_gpus 3 quickstart 128`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

BATCH, TOLERANCE = 2, 2e-2
MESHES = ({}, {"data": 2}, {"fsdp": 2}, {"expert": 2})


def measure(sizes: dict[str, int], steps: int, config: str, length: int) -> dict:
    """The JSON line of one mesh."""
    count = 2 if sizes else 1
    command = [sys.executable, "-m", "tests.train.mesh_losses", config, str(steps)]
    command += [str(BATCH), str(length), json.dumps(sizes), "bfloat16"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    gpus = ",".join(str(number) for number in range(count))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "XLA_FLAGS": flags}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{sizes}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(steps: int, config: str, length: int) -> int:
    """Measures every mesh; returns the exit status."""
    results = []
    for sizes in MESHES:
        results.append(measure(sizes, steps, config, length))
        print(json.dumps(results[-1]), flush=True)
    alone, worst = results[0], 0.0
    base = statistics.median(alone["seconds"][1:])
    for result in results:
        seconds = statistics.median(result["seconds"][1:])
        pairs = zip(result["losses"], alone["losses"], strict=True)
        difference = max(abs(a / b - 1) for a, b in pairs)
        worst = max(worst, difference)
        memory = (result["peak_bytes"] or 0) / 2**30
        name = ", ".join(f"{axis} {size}" for axis, size in result["mesh"].items()) or "one GPU"
        print(
            f"{name:10s} {seconds:8.3f} s  {base / seconds:5.2f} x  {memory:6.1f} GiB  "
            f"loss within {difference:.1e}"
        )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    given = dict(enumerate(sys.argv[1:]))
    sys.exit(main(int(given.get(0, 6)), given.get(1, "small"), int(given.get(2, 8192))))
