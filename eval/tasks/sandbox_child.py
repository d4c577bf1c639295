"""Limits this process, then becomes the Python that runs a file. Run by `eval.tasks.sandbox` alone.

    python -I sandbox_child.py SECONDS BYTES FILE

Only the standard library, and nothing of this project, is imported: it runs isolated.
"""

import math
import os
import resource
import sys


def main() -> None:
    """Sets the limits and replaces the process."""
    seconds, memory, file = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 1 << 24,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    os.execv(sys.executable, [sys.executable, "-I", file])


if __name__ == "__main__":
    main()
