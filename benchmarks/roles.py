"""Goodput of roles that adapt beside every static split: loads that shift each minute, and steady loads.

    python benchmarks/roles.py [--half first|second] [--cluster NAME] [--load NAME] [--turns N] [--aware]

Plays simulated clusters of two to six workers without and with an SLO that the server knows. `best static` is the
best of all splits of the workers between prefill and decode, found by trying; roles that adapt start from the even
split. `mixed` is a fleet of mixed workers. Options of `demand-roles` were chosen on the first half: other clusters and
other seeds than the second.
Writes benchmarks/results/roles-HALF.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from msgspec.structs import replace
from record import environment, write

from baton.core.config import Plugin, PolicyConfig, Topology
from baton.core.types import Slo, StepShape
from baton.decide.policy.policy_sets import policy_set
from baton.lab.report.summary import SloTargets
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimCost, SimWorkers, read_spec
from baton.lab.workload.request import Trace, TraceRequest

TURN_S = 60.0
GPUS = read_spec(Path(__file__).resolve().parent.parent / "examples" / "clusters" / "one-gpu-host.toml")
STATIC, ADAPTIVE = Plugin(use="static-roles"), Plugin(use="demand-roles")
Kind = tuple[int, int]
"""Mean prompt and answer tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster and the two kinds of requests that take turns on it."""

    spec: ClusterSpec
    workers: int
    slo: Slo
    prompts: Kind
    answers: Kind
    chat: Kind
    has_own_hosts: bool = False

    def split(self, prefill: int) -> ClusterSpec:
        """Return the cluster with this number of prefill workers. 0: all workers are mixed."""
        decode = self.workers - prefill
        spec = replace(self.spec, queue_requests_max=100_000)
        if not prefill:
            return replace(spec, topology=Topology(mixed=self.workers))
        if not self.has_own_hosts:
            return replace(spec, topology=Topology(prefill=prefill, decode=decode))
        groups = (
            SimWorkers(role="prefill", count=prefill, host="each"),
            SimWorkers(role="decode", count=decode, host="each"),
        )
        return replace(spec, workers=groups)

    def worker_s(self, kind: Kind) -> float:
        """Return the time of one worker that a request takes, with decode batches that keep TPOT."""
        cost, (prompt, answer) = self.spec.cost_model(), kind
        reach = prompt + answer // 2

        def step_s(batch: int) -> float:
            return cost.step_s(StepShape(decode_requests=batch, context_tokens=batch * reach))

        batch = max([n for n in range(1, self.spec.batch.requests_max + 1) if step_s(n) <= self.slo.tpot_s], default=1)
        time_s = cost.prefill_s(new_tokens=prompt, cached_tokens=0) + answer * step_s(batch) / batch
        return time_s * self.workers / (self.spec.workers_at_once or self.workers)


_GPU = Slo(ttft_s=1.5, tpot_s=0.03)
_CPU = Slo(ttft_s=6.0, tpot_s=0.2)
_GPU_KINDS = {"prompts": (6000, 20), "answers": (250, 500), "chat": (1500, 200)}
_CPU_KINDS = {"prompts": (800, 8), "answers": (40, 120), "chat": (200, 40)}
_SMALL = ClusterSpec()
_CORE = ClusterSpec(
    cost=SimCost(step_overhead_s=0.018, prefill_token_s=0.0022, decode_request_s=0.0027, context_token_s=1.4e-6)
)
"""One core of the machine of docs/benchmarks.md, with SmolLM2-135M in float32."""
_SHARED = replace(_CORE, workers_at_once=2)
"""Three such workers on two cores."""
HALVES: dict[str, dict[str, Case]] = {
    "first": {
        "gpu4": Case(GPUS, 4, _GPU, **_GPU_KINDS),
        "cpu6": Case(_SMALL, 6, _CPU, **_CPU_KINDS),
        "gpu3": Case(GPUS, 3, _GPU, (3000, 60), (500, 300), (1000, 200)),
        "gpu2": Case(GPUS, 2, _GPU, **_GPU_KINDS),
    },
    "second": {
        "gpu6": Case(GPUS, 6, _GPU, (4000, 40), (300, 400), (1200, 250)),
        "cpu4": Case(_SMALL, 4, _CPU, **_CPU_KINDS),
        "cpu2": Case(_SMALL, 2, _CPU, **_CPU_KINDS),
        "core3": Case(_CORE, 3, Slo(ttft_s=4.0, tpot_s=0.14), (300, 4), (32, 128), (150, 32)),
        "shared3": Case(_SHARED, 3, Slo(ttft_s=4.0, tpot_s=0.14), (300, 4), (32, 128), (150, 32)),
        "hosts5": Case(GPUS, 5, Slo(ttft_s=2.0, tpot_s=0.04), **_GPU_KINDS, has_own_hosts=True),
    },
}
SEEDS = {"first": (1, 2), "second": (11, 12)}
LOADS = ("shifting", "chat", "chat-low", "prompts", "answers")
USE = {"shifting": 0.7, "chat": 0.75, "chat-low": 0.4, "prompts": 0.6, "answers": 0.6}
"""Share of the workers' time that a load takes if no worker idles."""


def trace_of(case: Case, load: str, seed: int, turns: int) -> Trace:
    """Draw a load of `turns` minutes with Poisson arrivals."""
    draw, made, at_s = Random(f"{load}{seed}"), list[TraceRequest](), 0.0
    kinds = {"prompts": [case.prompts], "answers": [case.answers], "shifting": [case.prompts, case.answers]}
    taking = kinds.get(load, [case.chat])
    gaps_s = {kind: case.worker_s(kind) / (USE[load] * case.workers) for kind in taking}
    while at_s < turns * TURN_S:
        kind = taking[int(at_s / TURN_S) % len(taking)]
        at_s += draw.expovariate(1 / gaps_s[kind])
        prompt, answer = (max(1, round(tokens * draw.uniform(0.6, 1.4))) for tokens in kind)
        made.append(TraceRequest(at_s=at_s, input_tokens=prompt, output_tokens=answer))
    return Trace(format="made", timing="absolute", requests=tuple(made))


def goodput_rps(case: Case, trace: Trace, policy: PolicyConfig, prefill: int, *, aware: bool) -> float:
    """Return the requests a second that met both targets."""
    slo = case.slo
    records = replay_trace(case.split(prefill), trace, policy=policy, seed=0, slo=slo if aware else None)
    targets = SloTargets(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
    return sum(targets.met_by(record) for record in records) / trace.requests[-1].at_s


def play(case: Case, load: str, seeds: Sequence[int], turns: int, *, aware: bool) -> dict[str, Any]:
    """Return the goodput of each split, of roles that adapt, and their ratio, as means over the seeds."""
    ours = policy_set("baton")
    static, adaptive, even = replace(ours, roles=STATIC), replace(ours, roles=ADAPTIVE), case.workers // 2
    splits = dict.fromkeys(range(1, case.workers), 0.0)
    adapted = mixed = 0.0
    for seed in seeds:
        trace = trace_of(case, load, seed, turns)
        for prefill in splits:
            splits[prefill] += goodput_rps(case, trace, static, prefill, aware=aware) / len(seeds)
        mixed += goodput_rps(case, trace, static, 0, aware=aware) / len(seeds)
        adapted += goodput_rps(case, trace, adaptive, even, aware=aware) / len(seeds)
    best = max(splits, key=lambda prefill: splits[prefill])
    return {
        "static_rps": {f"{prefill}P{case.workers - prefill}D": round(rps, 3) for prefill, rps in splits.items()},
        "mixed_rps": round(mixed, 3),
        "adaptive_rps": round(adapted, 3),
        "over_best_static": round(adapted / splits[best], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=tuple(HALVES), default="second")
    parser.add_argument("--cluster", action="append")
    parser.add_argument("--load", action="append", choices=LOADS)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--aware", action="store_true", help="the server knows the SLO of the requests")
    args = parser.parse_args()
    print(environment()["commit"])
    figures = dict(results(args))
    name = f"roles-{args.half}" + ("-aware" if args.aware else "")
    write(name, {"turn_s": TURN_S, "turns": args.turns, "server_knows_slo": args.aware, "cases": figures})


def results(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, case in HALVES[args.half].items():
        if args.cluster and name not in args.cluster:
            continue
        for load in args.load or LOADS:
            row = play(case, load, SEEDS[args.half], args.turns, aware=args.aware)
            print(name, load, row, flush=True)
            yield f"{name}, {load}", row


if __name__ == "__main__":
    main()
