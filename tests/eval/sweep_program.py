"""A program as sweeps start them: notes that it ran, waits, writes numbers, or fails."""

import json
import pathlib
import sys
import time

flags = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
with open(flags["journal"], "a") as journal:
    journal.write(f"{flags['n']} {flags['seed']}\n")
if flags["n"] == flags.get("fail"):
    print("error: n is what it must not be", file=sys.stderr)
    sys.exit(2)
if gate := flags.get("gate"):
    # Waits where a test wants it to be under way.
    while float(flags["n"]) >= 2 and not pathlib.Path(gate).exists():
        time.sleep(0.05)
# The first seed is the worse for small n and the better for others.
n, seed = float(flags["n"]), int(flags["seed"])
numbers = {"loss": n + 0.125 * seed * (1 if n < 2 else -1), "text": "no number"}
pathlib.Path(flags["json"]).write_text(json.dumps(numbers | {"deep": {"x": 1}}))
