"""How fast the simulator is: simulated requests per second of processor time on one core, and its peak memory.

    python benchmarks/sim_speed.py --trace FILE [--limit N] [--against SRC] [--python EXE]     sim-speed.json
    python benchmarks/sim_speed.py --trace FILE --cells N                                      sim-speed-fleet.json

FILE is the conversation trace of AzurePublicDataset, 2023 (CSV, may be gzip). Every run is a process of its own. With
`--against`, the `src` folder of another version of this repository is measured too, run by run in turn with this one;
with `--python`, this version on another interpreter that has what Baton needs: how it was built makes a difference.
`--cells N` plays 40,000 requests per cell, the trace over and over and ten times as fast, on N cells of 40 workers:
25 cells are 1,000 workers with a million requests. Cells are played by `--processes P` processes at once.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from msgspec.structs import replace
from record import write

from baton.cli.sim import play_cells
from baton.core.config import Topology
from baton.decide.policy.policy_sets import policy_set
from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.cells import cell_jobs
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import load_spec
from baton.lab.workload.load import read_trace
from baton.lab.workload.request import Trace

HERE = Path(__file__).resolve()
CLUSTER = HERE.parent.parent / "examples" / "clusters" / "one-gpu-host.toml"
SRC = HERE.parent.parent / "src"
SHAPES = ((1, 1, 1.0), (20, 20, 1.0), (20, 20, 20.0))
"""Prefill workers, decode workers, how many times as fast the trace is played."""
POLICIES = ("least-load", "baton")
CELL_REQUESTS = 40_000
CELL_RATE_SCALE = 10.0


def repeated(trace: Trace, count: int) -> Trace:
    """Play a trace over and over until it has `count` requests."""
    length_s = trace.requests[-1].at_s + 1.0
    rounds = -(-count // len(trace.requests))
    requests = (
        replace(request, at_s=request.at_s + turn * length_s) for turn in range(rounds) for request in trace.requests
    )
    return replace(trace, requests=tuple(islice(requests, count)))


def scaled(trace: Trace, factor: float) -> Trace:
    return replace(trace, requests=tuple(replace(request, at_s=request.at_s / factor) for request in trace.requests))


def one(job: dict[str, object]) -> dict[str, object]:
    """Simulate once, in this process."""
    spec = replace(load_spec(CLUSTER.read_text()), queue_requests_max=1_000_000)
    spec = replace(spec, topology=Topology(prefill=int(job["prefill"]), decode=int(job["decode"])))
    trace = read_trace(Path(str(job["trace"])), limit=job["limit"])
    if job["cells"]:
        spec = replace(spec, cells=int(job["cells"]))
        trace = repeated(trace, int(job["cells"]) * CELL_REQUESTS)
    trace = scaled(trace, float(job["rate_scale"]))
    wall_s, cpu_s = perf_counter(), processor_s()
    if job["processes"]:
        processes = int(job["processes"])
        jobs = cell_jobs(spec, trace, policy_set(str(job["policy"])), seed=0, slo=None)
        records = play_cells(jobs, processes=processes)
    else:
        records = replay_trace(spec, trace, policy=str(job["policy"]), seed=0)
    cpu_s, wall_s = processor_s() - cpu_s, perf_counter() - wall_s
    results = summarize(records, slo=SloTargets(), wall_s=wall_s)
    return {
        "python": f"{platform.python_version()}, {platform.python_compiler()}",
        "requests": len(records),
        "completed": results.completed,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "output_tokens": sum(record.output_tokens for record in records),
        "virtual_s": results.duration_s,
        "ttft_p50_s": results.ttft_s.p50,
        "tpot_p50_s": results.tpot_s.p50,
        "memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "memory_peak_cell_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def processor_s() -> float:
    """Processor time of this process, and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def measure(src: Path, job: dict[str, object], python: str = sys.executable) -> dict[str, object]:
    """Simulate once, in a process that imports from `src`."""
    command = [python, str(HERE), "--one", json.dumps(job)]
    done = subprocess.run(command, check=True, capture_output=True, env={"PYTHONPATH": str(src)})
    return json.loads(done.stdout)


def figures(runs: list[dict[str, object]]) -> dict[str, object]:
    """Medians of some runs of one job."""
    cpu_s = median(float(run["cpu_s"]) for run in runs)
    last = runs[-1]
    return {
        "python": last["python"],
        "requests": last["requests"],
        "completed": last["completed"],
        "requests_per_cpu_s": round(int(last["requests"]) / cpu_s, 1),
        "requests_per_cpu_s_best": round(int(last["requests"]) / min(float(run["cpu_s"]) for run in runs), 1),
        "output_tokens_per_cpu_s": round(int(last["output_tokens"]) / cpu_s, 1),
        "virtual_s_per_cpu_s": round(float(last["virtual_s"]) / cpu_s, 1),
        "requests_per_wall_s": round(int(last["requests"]) / median(float(run["wall_s"]) for run in runs), 1),
        "wall_s": round(median(float(run["wall_s"]) for run in runs), 3),
        "memory_peak_gib": round(max(int(run["memory_peak_bytes"]) for run in runs) / 2**30, 3),
        "memory_peak_cell_gib": round(max(int(run["memory_peak_cell_bytes"]) for run in runs) / 2**30, 3),
        "ttft_p50_s": last["ttft_p50_s"],
        "tpot_p50_s": last["tpot_p50_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="SRC")
    parser.add_argument("--python", metavar="EXE")
    parser.add_argument("--cells", type=int, default=0, metavar="N")
    parser.add_argument("--processes", type=int, default=0, metavar="P")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(one(json.loads(args.one))))
        return
    job = {"trace": str(args.trace.resolve()), "limit": args.limit, "cells": args.cells, "policy": "least-load"}
    job["processes"] = args.processes
    if args.cells:
        job |= {"prefill": 20, "decode": 20, "rate_scale": CELL_RATE_SCALE * args.cells}
        write("sim-speed-fleet", {"job": job | {"trace": args.trace.name}, "figures": figures([measure(SRC, job)])})
        return
    versions: dict[str, tuple[Path, str]] = {"this": (SRC, sys.executable)}
    versions |= {"against": (args.against, sys.executable)} if args.against is not None else {}
    versions |= {"other python": (SRC, args.python)} if args.python is not None else {}
    found: dict[str, dict[str, object]] = {}
    for prefill, decode, rate_scale in SHAPES:
        for policy in POLICIES:
            job |= {"prefill": prefill, "decode": decode, "rate_scale": rate_scale, "policy": policy}
            runs: dict[str, list[dict[str, object]]] = {version: [] for version in versions}
            for _ in range(args.runs):
                for version, (src, python) in versions.items():
                    runs[version].append(measure(src, job, python))
            found[f"{prefill}P{decode}D, rate x {rate_scale:g}, {policy}"] = {
                version: figures(measured) for version, measured in runs.items()
            }
    write("sim-speed", {"trace": args.trace.name, "limit": args.limit, "runs": args.runs, "median_of": found})


if __name__ == "__main__":
    main()
