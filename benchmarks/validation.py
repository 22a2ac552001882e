"""The simulator against our own engine: live runs of `baton serve`, and the same arrivals simulated.

    python benchmarks/validation.py [--topology pd|mixed] [--requests N] [--calibration N] [--load R ...]
                                    [--prefixes own|shared] [--dtype D]

For each topology: a calibration run, whose step log a cost model is fitted to, and lone requests, which tell what lies
between a client and a worker; then live runs at shares of the capacity that the simulator predicts, with and without
shared prefixes; then the simulator on the arrivals that were measured. Aim: means and p90 within 5 %, p99 within 10 %.
Load generator, server and workers share this machine, and steps are charged as they took beside the others: run it on
a quiet machine. A shared machine is faster in one minute than in the next, and queues make much of it, so each run is
simulated several times: with the prices of the calibration; with all of them times one number, what this run's steps
took over what they should have (`drift`); with one such number for every worker and second of the run (`Slow` faults),
which leaves the simulator's own error; and `DRAWS` times with the scatter of the calibration's steps and other seeds,
whose median is compared, and whose range is the interval of the prediction. Workers keep to their cores: the cost of a
step knows of none that a neighbour lends. They draft no tokens: the simulator has no text to draft from. Writes
benchmarks/results/validation.json, with the profile of each topology: prices, link and edge.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np
import record
from _beside_live import judge, judge_drawn, show

from baton.core.config import Topology
from baton.core.types import Role, WorkerId
from baton.decide.cost.fitted import FittedCost, LoggedStep, StepProfile, fit_logs, read_step_log, save_fitted
from baton.decide.policy.policy_sets import policy_set
from baton.lab.bench.options import BenchOptions, TraceFile, TraceTimes
from baton.lab.bench.run import RunListener, run_bench
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.cells import CellJob
from baton.lab.sim.faults import Slow
from baton.lab.sim.replay_trace import play_cell
from baton.lab.sim.spec import ClusterSpec, SimEdge, SimKind, SimKV, SimLink, SimWorkers
from baton.lab.workload.arrivals import PoissonArrivals
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.schedule import redraw_arrivals

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.serving import serving

TOPOLOGIES = {"pd": Topology(prefill=1, decode=1), "mixed": Topology(mixed=1)}
INPUT_TOKENS, OUTPUT_TOKENS = (16, 320), (8, 64)
"""Bounds of lengths, drawn evenly."""
PREFIXES, PREFIX_TOKENS, BLOCK_TOKENS, BLOCKS = 4, 128, 16, 2048
"""With shared prefixes, two thirds of the prompts begin with one of so many, of so many tokens."""
LOADS = (0.3, 0.6, 0.85)
LONE_REQUESTS = 16
CALIBRATION_LOADS = (0.0, 0.5, 0.9)
"""Shares of capacity at which steps are measured, by a first rough fit; 0 is all at once."""
DRAWS = 15
"""Simulations with noise, each with another seed: their range leaves out an eighth of such runs."""
WINDOW_S = 1.0
"""How long the machine is taken to be of one speed, where that is looked at."""
LINKS = 4
"""Messages between the arrival of a request and the news of its first step: to the worker, to the pool, back, news."""
Prefixes = Literal["own", "shared"]


@dataclass(frozen=True, slots=True)
class Profile:
    """What the simulator is told about the machine: the versioned overhead of the engine, measured."""

    cost: FittedCost
    link_s: float
    edge: SimEdge


def load(requests: int, seed: int, prefixes: Prefixes) -> Trace:
    """Draw requests that all arrive at once."""
    draw, made = Random(seed), []
    for _ in range(requests):
        prompt, answer = draw.randint(*INPUT_TOKENS), draw.randint(*OUTPUT_TOKENS)
        shares = prefixes == "shared" and draw.random() < 2 / 3
        blocks = PREFIX_TOKENS // BLOCK_TOKENS
        first = draw.randrange(PREFIXES) * blocks
        made.append(
            TraceRequest(
                at_s=0.0,
                input_tokens=prompt + (PREFIX_TOKENS if shares else 0),
                output_tokens=answer,
                prefix_ids=tuple(range(first, first + blocks)) if shares else (),
                prefix_block_tokens=BLOCK_TOKENS if shares else 0,
            )
        )
    return Trace(format="made", timing="absolute", requests=tuple(made))


def at_rate(trace: Trace, rate_rps: float, seed: int) -> Trace:
    return redraw_arrivals(trace, PoissonArrivals(rate_rps), Random(seed))


# ---- the live side


def configuration(folder: Path, *, cost: FittedCost | None, step_log: Path | None) -> list[str]:
    """Arguments of `baton serve`, with the cost model that policies decide by."""
    lines = ['idle_cores = "keep"', "speculation = { tokens_max = 0 }"]  # the simulator has no drafts
    lines += [f'step_log = "{step_log}"'] if step_log is not None else []
    lines += [f"[kv]\nblocks = {BLOCKS}\nblock_tokens = {BLOCK_TOKENS}"]
    if cost is not None:
        file = folder / "cost.json"
        file.write_text(save_fitted(cost))
        lines += [f'[cost]\nmodel = "fitted"\nfile = "{file}"']
    path = folder / "baton.toml"
    path.write_text("\n".join(lines) + "\n")
    return ["--config", str(path)]


def send(url: str, trace: Trace, seed: int) -> list[RequestRecord]:
    """Send a trace and return what its client saw, request by request."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(_row(request)) + b"\n" for request in trace.requests))
        options = BenchOptions(
            url=f"{url}/v1",
            workload=TraceFile(path=path, limit=None, rate_scale=1.0),
            pacing=TraceTimes(),
            seed=seed,
            prompt_format="ids",
        )
        report = asyncio.run(run_bench(options, stop=asyncio.Event(), watcher=RunListener()))
    if report.results.completed < len(trace.requests):
        raise SystemExit(f"{len(trace.requests) - report.results.completed} live requests failed: {report.failures}")
    return [reply.record for reply in sorted(report.replies, key=lambda reply: reply.index)]


def _row(request: TraceRequest) -> dict[str, Any]:
    row = msgspec.to_builtins(request)
    return {name: row[name] for name in ("at_s", "input_tokens", "output_tokens", "prefix_ids", "prefix_block_tokens")}


@dataclass(frozen=True, slots=True)
class Alone:
    """A request that had the whole machine."""

    prompt_tokens: int
    queue_s: float
    """As the server tells: its arrival to the news of its first step."""
    edge_s: float
    """What its client waited for the first token beyond the server's queue and prefill."""


def send_alone(client: Any, seed: int) -> list[Alone]:  # noqa: ANN401  an httpx client
    """Send one request after the other, each with a longer prompt."""
    draw, seen = Random(seed), list[Alone]()
    for index in range(LONE_REQUESTS + 2):
        tokens = INPUT_TOKENS[0] + (INPUT_TOKENS[1] - INPUT_TOKENS[0]) * index // (LONE_REQUESTS + 1)
        prompt = [draw.randrange(1000, 40000) for _ in range(tokens)]
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, "stream": True}
        started_s, moments, last = time.perf_counter(), list[float](), ""
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    moments.append(time.perf_counter())
                    last = line
        timings = json.loads(last[6:])["timings"]
        edge_s = moments[0] - started_s - timings["queue_s"] - timings["prefill_s"]
        seen.append(Alone(tokens, timings["queue_s"], edge_s))
    return seen[2:]  # the first two warm up


# ---- the simulated side


def cluster(topology: Topology, profile: Profile) -> ClusterSpec:
    counts: dict[Role, int] = {"prefill": topology.prefill, "decode": topology.decode, "mixed": topology.mixed}
    kv = SimKV(blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    return ClusterSpec(
        workers=tuple(SimWorkers(role=role, count=count, kind="cpu") for role, count in counts.items() if count),
        kinds={"cpu": SimKind(cost={"model": "fitted", "fit": msgspec.to_builtins(profile.cost)}, kv=kv)},
        kv=kv,
        link=SimLink(delay_min_s=profile.link_s, delay_max_s=profile.link_s),
        edge=profile.edge,
        output_tokens_max=OUTPUT_TOKENS[1],
    )


def simulate(spec: ClusterSpec, trace: Trace, faults: Sequence[Slow] = (), *, seed: int = 0) -> list[RequestRecord]:
    job = CellJob(spec=spec, trace=trace, policy=policy_set("baton"), seed=seed, slo=None, faults=tuple(faults))
    return play_cell(job)


def capacity_rps(spec: ClusterSpec, trace: Trace) -> float:
    """How fast a load that comes all at once is worked off."""
    records = simulate(spec, trace)
    return len(records) / max(record.end_s for record in records)


# ---- calibration


def measure(topology: Topology, requests: int, arguments: Sequence[str], seed: int) -> tuple[Profile, dict[str, Any]]:
    """Fit the steps of a live run, and tell link and edge from lone requests."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration(folder, cost=None, step_log=folder / "steps")
        with serving(*roles(topology), *arguments, *config) as server:
            with server.client() as client:
                alone = send_alone(client, seed)
            runs = calibrate(server.url, requests, seed)
        steps = {file.stem: read_step_log(file) for file in sorted((folder / "steps").iterdir())}
    points = [step for written in steps.values() for step in written]
    engine, machine = " ".join([*roles(topology), *arguments]), record.environment()["cpu"]
    profile = StepProfile(engine=engine, llm="smollm2-135m", machine=machine, points=tuple(points))
    cost = fit_logs(profile, list(steps.values()))
    between_ratio = sum(point.step_s - point.engine_s for point in points) / sum(point.step_s for point in points)
    notes = {
        "steps": len(points),
        "outside_the_engine_ratio": round(between_ratio, 4),
        "fit_over_measured": {
            f"{worker}, {name}": bias(cost, [step for step in written if begin_s <= step.at_s <= end_s])
            for worker, written in steps.items()
            for name, (begin_s, end_s) in runs.items()
        },
    }
    return Profile(cost, median(one.queue_s for one in alone) / LINKS, edge_of(alone)), notes


def calibrate(url: str, requests: int, seed: int) -> dict[str, tuple[float, float]]:
    """Send requests all at once, then at shares of the rate that this came to. Returns when each run went."""
    runs: dict[str, tuple[float, float]] = {}
    rate_rps = 0.0
    for number, share in enumerate(CALIBRATION_LOADS):
        trace = load(requests, seed + number, "shared" if number % 2 else "own")
        records = send(url, at_rate(trace, share * rate_rps, seed) if share else trace, seed + number)
        begin_s, end_s = min(sent.arrival_s for sent in records), max(sent.end_s for sent in records)
        runs[f"{share:.0%} load" if share else "all at once"] = begin_s, end_s
        rate_rps = rate_rps or requests / (end_s - begin_s)
    return runs


def bias(cost: FittedCost, steps: Sequence[LoggedStep]) -> float | None:
    """Predicted over measured seconds of all these steps: what it is off by, the simulator of such a load is too."""
    measured_s = sum(step.step_s for step in steps)
    return round(sum(cost.step_s(step) for step in steps) / measured_s, 4) if steps else None


def edge_of(alone: Sequence[Alone]) -> SimEdge:
    """What lies outside the server's own times, as a line over the prompts' lengths."""
    slope_s, start_s = np.polyfit([one.prompt_tokens for one in alone], [one.edge_s for one in alone], 1)
    if start_s < 0 or slope_s < 0:
        return SimEdge(request_s=max(0.0, median(one.edge_s for one in alone)))
    return SimEdge(request_s=float(start_s), prompt_token_s=float(slope_s))


def roles(topology: Topology) -> list[str]:
    counts = {"--prefill": topology.prefill, "--decode": topology.decode, "--mixed": topology.mixed}
    return [part for flag, count in counts.items() if count for part in (flag, str(count))]


# ---- comparison


def as_sent(trace: Trace, records: Sequence[RequestRecord]) -> Trace:
    """The trace with the times at which its requests really left."""
    start_s = min(record.arrival_s for record in records)
    requests = [
        msgspec.structs.replace(request, at_s=sent.arrival_s - start_s)
        for request, sent in zip(trace.requests, records, strict=True)
    ]
    return msgspec.structs.replace(trace, requests=tuple(requests))


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What was sent, and what its client saw of it."""

    trace: Trace
    records: list[RequestRecord]

    @property
    def begin_s(self) -> float:
        """When the first of its requests left, on the clock of the host."""
        return min(sent.arrival_s for sent in self.records)

    def steps(self, log: Sequence[LoggedStep]) -> list[LoggedStep]:
        """Those of its steps, by the clock of the host."""
        end_s = max(sent.end_s for sent in self.records)
        return [step for step in log if self.begin_s <= step.at_s <= end_s]


def speeds(cost: FittedCost, live: LiveRun, worker: str, log: Sequence[LoggedStep]) -> list[Slow]:
    """What a worker's steps took over what they should have, in every window of a run in which it began any."""
    windows: dict[int, list[LoggedStep]] = {}
    for step in live.steps(log):
        windows.setdefault(int((step.at_s - live.begin_s) / WINDOW_S), []).append(step)
    return [
        Slow(
            worker=WorkerId(worker),
            at_s=number * WINDOW_S,
            for_s=WINDOW_S,
            factor=sum(step.step_s for step in steps) / sum(cost.step_s(step) for step in steps),
        )
        for number, steps in sorted(windows.items())
    ]


def run_live(
    topology: Topology, arguments: Sequence[str], profile: Profile, capacity: float, args: argparse.Namespace
) -> tuple[dict[str, LiveRun], dict[str, list[LoggedStep]]]:
    """Serve every load. Returns the runs by name, and the steps of each worker in all of them."""
    runs: dict[str, LiveRun] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = configuration(folder, cost=profile.cost, step_log=folder / "steps")
        with serving(*roles(topology), *arguments, *config) as server:
            for prefixes in args.prefixes or ("own", "shared"):
                for number, share in enumerate(args.load or LOADS):
                    seed = args.seed + 100 + number
                    trace = at_rate(load(args.requests, seed, prefixes), share * capacity, seed)
                    records = send(server.url, trace, seed + (1000 if prefixes == "shared" else 0))
                    runs[f"{prefixes} prefixes, {share:.0%} of capacity"] = LiveRun(trace, records)
        return runs, {file.stem: read_step_log(file) for file in sorted((folder / "steps").iterdir())}


def validate(name: str, args: argparse.Namespace) -> dict[str, Any]:
    topology, arguments = TOPOLOGIES[name], ["--dtype", args.dtype]
    profile, notes = measure(topology, args.calibration, arguments, args.seed)
    exact = replace(profile, cost=msgspec.structs.replace(profile.cost, noise=None))
    capacity = capacity_rps(cluster(topology, exact), load(200, args.seed, "own"))
    lives, logs = run_live(topology, arguments, exact, capacity, args)
    log = [step for steps in logs.values() for step in steps]
    runs: dict[str, Any] = {}
    for run, live in lives.items():
        as_it_was = as_sent(live.trace, live.records)
        drift = 1 / (bias(exact.cost, live.steps(log)) or 1.0)
        drifted = replace(exact, cost=at_speed(exact.cost, drift))
        of_seconds = [slow for worker in logs for slow in speeds(exact.cost, live, worker, logs[worker])]
        calm, noisy = cluster(topology, exact), cluster(topology, profile)
        drawn = [simulate(noisy, as_it_was, seed=seed) for seed in range(DRAWS)]
        runs[run] = {
            "drift": round(drift, 4),
            "calibrated": judge(live.records, simulate(calm, as_it_was)),
            "at the speed of the run": judge(live.records, simulate(cluster(topology, drifted), as_it_was)),
            "at the speed of every second": judge(live.records, simulate(calm, as_it_was, of_seconds)),
            "drawn": judge_drawn(live.records, drawn),
        }
        for prices in list(runs[run])[1:]:
            show(name, f"{run}, {prices}", runs[run][prices])
    told = {"version": 1, "cost": msgspec.to_builtins(profile.cost), "link_s": profile.link_s}
    return {
        "profile": {**told, "edge": msgspec.to_builtins(profile.edge), **notes},
        "capacity_rps": capacity,
        "runs": runs,
    }


def at_speed(cost: FittedCost, ratio: float) -> FittedCost:
    """The same prices on a machine on which every step takes `ratio` times as long."""
    return msgspec.structs.replace(
        cost,
        start_s=cost.start_s * ratio,
        band_s=tuple(price_s * ratio for price_s in cost.band_s),
        sequence_s=cost.sequence_s * ratio,
        decode_s=cost.decode_s * ratio,
        pair_s=cost.pair_s * ratio,
        context_token_s=cost.context_token_s * ratio,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", action="append", choices=list(TOPOLOGIES))
    parser.add_argument("--requests", type=int, default=200, help="of each live run")
    parser.add_argument("--calibration", type=int, default=100, help="requests of each of the calibration's loads")
    parser.add_argument("--load", type=float, action="append", help="share of the capacity")
    parser.add_argument("--prefixes", action="append", choices=("own", "shared"), help="default: both")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    measured = {name: {"taken": record.environment(), **validate(name, args)} for name in args.topology or TOPOLOGIES}
    record.write("validation", {**record.earlier("validation", TOPOLOGIES), **measured})


if __name__ == "__main__":
    main()
