"""How many bytecodes a simulated request takes, and in which functions: the same on a quiet machine and on a busy one.

    python benchmarks/sim_bytecodes.py --trace FILE [--against SRC]     sim-bytecodes.json

FILE is the conversation trace of AzurePublicDataset, 2023 (CSV, may be gzip), played on 20 prefill and 20 decode
workers. What a run of 250 requests takes more than one of 50, so that setting up is not in it; what functions of the
interpreter and of other packages do is not either. It says where to look; `sim_instructions.py` says what it costs.
With `--against`, the `src` folder of another version of this repository is counted too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Protocol

from record import write
from sim_speed import POLICIES, SRC, one

HERE = Path(__file__).resolve()
FEW, MANY = 50, 250
SHOWN = 25
"""Functions that are listed."""


class Tracer(Protocol):
    def __call__(self, frame: FrameType, event: str, argument: object, /) -> Tracer: ...


def traced(job: dict[str, object]) -> tuple[Counter[CodeType], Counter[CodeType]]:
    """Simulate once. Returns the bytecodes and the calls of each function."""
    bytecodes, calls = Counter[CodeType](), Counter[CodeType]()

    def inside(frame: FrameType, event: str, _argument: object) -> Tracer:
        if event == "opcode":
            bytecodes[frame.f_code] += 1
        return inside

    def entered(frame: FrameType, _event: str, _argument: object) -> Tracer:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        calls[frame.f_code] += 1
        return inside

    sys.settrace(entered)
    one(job)
    sys.settrace(None)
    return bytecodes, calls


def per_request(job: dict[str, object]) -> dict[str, object]:
    """Count in this process. What the two runs have in common, the first of all has done already: imports."""
    one(job | {"limit": 1})
    few, many = traced(job | {"limit": FEW}), traced(job | {"limit": MANY})
    bytecodes, calls = (
        {code: (many[kind][code] - few[kind][code]) / (MANY - FEW) for code in many[kind]} for kind in (0, 1)
    )
    ours = [code for code in sorted(bytecodes, key=lambda code: -bytecodes[code]) if "/baton/" in code.co_filename]
    return {
        "bytecodes": round(sum(bytecodes[code] for code in ours)),
        "calls": round(sum(calls[code] for code in ours)),
        "most": {_name(code): [round(bytecodes[code], 1), round(calls[code], 2)] for code in ours[:SHOWN]},
    }


def _name(code: CodeType) -> str:
    return f"{code.co_filename.rpartition('/baton/')[2]} {code.co_qualname}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--against", type=Path, metavar="SRC")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(per_request(json.loads(args.one))))
        return
    job = {"trace": str(args.trace.resolve()), "cells": 0, "processes": 0}
    job |= {"prefill": 20, "decode": 20, "rate_scale": 1.0}
    versions = {"this": SRC} | ({"against": args.against} if args.against is not None else {})
    found: dict[str, dict[str, object]] = {}
    for policy in POLICIES:
        for version, src in versions.items():
            command = [sys.executable, str(HERE), "--one", json.dumps(job | {"policy": policy})]
            environment = {"PYTHONPATH": str(src), "PYTHONHASHSEED": "0"}
            done = subprocess.run(command, check=True, capture_output=True, env=environment)
            found.setdefault(policy, {})[version] = json.loads(done.stdout)
    write("sim-bytecodes", {"trace": args.trace.name, "requests": [FEW, MANY], "per_request": found})


if __name__ == "__main__":
    main()
