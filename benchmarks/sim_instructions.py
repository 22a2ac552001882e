"""How many instructions a simulated request takes, counted by valgrind: the same on a quiet machine and on a busy one.

    python benchmarks/sim_instructions.py --trace FILE [--against SRC]                    sim-instructions.json
    python benchmarks/sim_instructions.py --trace FILE [--against SRC] --policy baton     sim-instructions-baton.json

FILE is the conversation trace of AzurePublicDataset, 2023 (CSV, may be gzip), played on 20 prefill and 20 decode
workers. What a run of 700 requests takes more than one of 300, so that starting Python is not in it; reading 400 rows
of the trace and summing up their results are. With `--against`, the `src` folder of another version of this repository
is counted too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from record import write

HERE = Path(__file__).resolve()
SRC = HERE.parent.parent / "src"
FEW, MANY = 300, 700
POLICY = "least-load"
_COUNT = re.compile(r"Collected : (\d+)")


def counted(src: Path, job: dict[str, object]) -> int:
    """Simulate once under valgrind, in a process that imports from `src`. Returns its instructions.

    It is simulated without valgrind first, so that all modules are compiled to bytecode by then.
    """
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command = [sys.executable, str(HERE.with_name("sim_speed.py")), "--one", json.dumps(job)]
    environment = {"PYTHONPATH": str(src), "PYTHONHASHSEED": "0", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    done = subprocess.run([*valgrind, *command], check=True, capture_output=True, text=True, env=environment)
    found = _COUNT.search(done.stderr)
    if found is None:
        raise SystemExit(f"valgrind did not say what it counted: {done.stderr[-300:]}")
    return int(found[1])


def per_request(src: Path, job: dict[str, object]) -> float:
    few, many = (counted(src, job | {"limit": limit}) for limit in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--against", type=Path, metavar="SRC")
    parser.add_argument("--policy", default=POLICY)
    args = parser.parse_args()
    job: dict[str, object] = {"trace": str(args.trace.resolve()), "cells": 0, "processes": 0, "policy": args.policy}
    job |= {"prefill": 20, "decode": 20, "rate_scale": 1.0}
    versions = {"this": SRC} | ({"against": args.against} if args.against is not None else {})
    instructions = {version: per_request(src, job) for version, src in versions.items()}
    write(
        "sim-instructions" if args.policy == POLICY else f"sim-instructions-{args.policy}",
        {"trace": args.trace.name, "policy": args.policy, "requests": [FEW, MANY], "per_request": instructions},
    )


if __name__ == "__main__":
    main()
