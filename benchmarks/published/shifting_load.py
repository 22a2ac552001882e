"""Arrow's and TetriInfer's gains in shape: roles that change, under a load that shifts between prompts and answers.

    python benchmarks/published/shifting_load.py [--requests N] [--turn-s S]

Published: Arrow serves up to 2.55 times the rate of a static split within its SLO (v2 of the paper withdraws the larger
figures of v1). TetriInfer, OPT-13B, mixed light and heavy requests against vLLM: TTFT -97 %, job completion time -47 %,
resources -38 %. Here: the highest rate at which nine tenths of the requests meet TTFT 1.5 s and TPOT 0.03 s, on four
accelerators (examples/clusters/one-gpu-host.toml), long prompts with short answers and the reverse taking turns, beside
what four accelerators could do at most; and TetriInfer on its hardware against engines that compute prompts first, as
vLLM did: four of them against 2P2D, and one against 1P1D, whose KV heavy answers fill.
Writes benchmarks/results/published-shifting-load.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from random import Random
from statistics import fmean

from msgspec.structs import replace
from outcome import CLUSTERS, store

from baton.core.config import BatchLimits, Plugin, PolicyConfig, Topology
from baton.core.types import Role, Slo, StepShape
from baton.metrics.summary import SloTargets, summarize
from baton.policy.named import NAMED
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import ClusterSpec, SimWorkers, read_spec
from baton.workload.arrivals import PoissonArrivals
from baton.workload.request import Trace, TraceRequest
from baton.workload.schedule import scale_rate, with_arrivals

SLO = Slo(ttft_s=1.5, tpot_s=0.03)
ATTAINED, RATE_STEP = 0.9, 1.05
PROMPTS, ANSWERS = (6000, 20), (250, 500)
"""Prompt and answer tokens of the two halves of a turn."""
GAPS_S = {PROMPTS: 0.085, ANSWERS: 0.020}
"""Between requests at a scale of 1: three of the four accelerators are busy with prompts, then three with answers."""
LIGHT, HEAVY = (128, 32), (1500, 600)
SPLITS = ((1, 3), (2, 2), (3, 1))
WHOLE = BatchLimits(step_tokens_max=2560, requests_max=128)
RATES_RPS = (2.0, 6.0, 14.0)
ENGINES = ((4, 2), (1, 1))
"""Engines of the baseline, and TetriInfer's of each side: as many GPUs, or half as many."""
PROMPTS_FIRST = replace(NAMED["sarathi"], batching=Plugin(use="baton.policy.batching:PrefillFirst"))
PUBLISHED = {
    "arrow over static": 2.55,
    "tetriinfer TTFT": -0.97,
    "tetriinfer JCT": -0.47,
    "tetriinfer resources": -0.38,
}


def shifting(requests: int, turn_s: float) -> Trace:
    """Let the two kinds of load take turns, each of the same length in time."""
    draw, made, at_s = Random(0), list[TraceRequest](), 0.0
    while len(made) < requests:
        kind = PROMPTS if int(at_s / turn_s) % 2 == 0 else ANSWERS
        at_s += draw.expovariate(1 / GAPS_S[kind])
        made.append(_request(at_s, kind, draw))
    return Trace(format="made", timing="absolute", requests=tuple(made))


def light_and_heavy(requests: int, rate_rps: float, prompts: Sequence[int], answers: Sequence[int]) -> Trace:
    """TetriInfer's mixes: prompts and answers, each light or heavy, drawn from those given."""
    draw = Random(0)
    made = [_request(0.0, (draw.choice(prompts), draw.choice(answers)), draw) for _ in range(requests)]
    trace = Trace(format="made", timing="absolute", requests=tuple(made))
    return with_arrivals(trace, PoissonArrivals(rate_rps), draw)


def _request(at_s: float, kind: tuple[int, int], draw: Random) -> TraceRequest:
    prompt, answer = (max(1, round(tokens * draw.uniform(0.6, 1.4))) for tokens in kind)
    return TraceRequest(at_s=at_s, input_tokens=prompt, output_tokens=answer)


def capacity_scale(spec: ClusterSpec, trace: Trace, policy: str) -> float:
    """Find how much faster the trace may be played with nine tenths in their SLO, to 5 %."""

    def holds(scale: float) -> bool:
        records = replay_trace(spec, scale_rate(trace, scale), policy=policy, seed=0, slo=SLO)
        targets = SloTargets(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s)
        return (summarize(records, slo=targets, wall_s=0.0).slo.attainment_ratio or 0.0) >= ATTAINED

    low, high = 0.1, 4.0
    while high / low > RATE_STEP:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def arrow(spec: ClusterSpec, trace: Trace) -> dict[str, float | str]:
    """Compare with the best static split; and with a mixed fleet, Splitwise's mixed pool on each split, and ours."""

    def of(policy: str, topology: Topology) -> float:
        scale = capacity_scale(replace(spec, topology=topology), trace, policy)
        print(f"{policy:10} {topology.prefill}P{topology.decode}D holds {scale:.2f} times the load", flush=True)
        return scale

    split = {f"{x}P{y}D": Topology(prefill=x, decode=y) for x, y in SPLITS}
    static = {name: of("distserve", topology) for name, topology in split.items()}
    best = max(static, key=lambda name: static[name])
    moving = {name: of(name, split["2P2D"]) for name in ("arrow", "tetriinfer", "sarathi", "baton")}
    moving["splitwise"] = max(of("splitwise", topology) for topology in split.values())
    return {
        "best static split": best,
        "static": static[best],
        **moving,
        **{f"{name} over static": round(scale / static[best], 2) for name, scale in moving.items()},
        "at most": round(bound_scale(spec), 2),
    }


def bound_scale(spec: ClusterSpec) -> float:
    """How much faster the trace could be played at most: every accelerator busy through the harder half of a turn.

    Answers decode in the fullest batch that keeps TPOT, prompts take no longer than alone, and the tenth of the
    requests that may miss is not served at all.
    """
    cost, workers = spec.cost_model(), spec.topology.prefill + spec.topology.decode

    def busy_s(kind: tuple[int, int]) -> float:
        """Accelerator-seconds of a request."""
        prompt, answer = kind
        prompt_s = cost.prefill_s(new_tokens=prompt, cached_tokens=0) - cost.step_s(StepShape())

        def step_s(requests: int) -> float:
            context_tokens = requests * (prompt + answer // 2)
            return cost.step_s(StepShape(decode_requests=requests, context_tokens=context_tokens))

        full = max(n for n in range(1, spec.batch.requests_max + 1) if step_s(n) <= SLO.tpot_s)
        return prompt_s + answer * step_s(full) / full

    return min(workers * gap_s / busy_s(kind) for kind, gap_s in GAPS_S.items()) / ATTAINED


def tetriinfer(spec: ClusterSpec, trace: Trace, engines: int, each_side: int) -> dict[str, float]:
    """Compare mean TTFT and job completion time, and the GPU-seconds until the last answer."""
    sides: tuple[Role, ...] = ("prefill", "decode")
    split = tuple(SimWorkers(role=role, count=each_side, kind="v100", host="each") for role in sides)
    mixed = (SimWorkers(role="mixed", count=engines, kind="v100", host="each"),)
    systems: dict[str, tuple[ClusterSpec, PolicyConfig]] = {
        "tetriinfer": (replace(spec, workers=split), NAMED["tetriinfer"]),
        "vllm": (replace(spec, workers=mixed, batch=WHOLE), PROMPTS_FIRST),
    }
    found: dict[str, tuple[float, float, float]] = {}
    for name, (played, policy) in systems.items():
        records = replay_trace(played, trace, policy=policy, seed=0)
        ttft_s = fmean(record.ttft_s for record in records if record.ttft_s is not None)
        jct_s = fmean(record.e2e_s for record in records if record.e2e_s is not None)
        gpu_s = len(played.views()) * max(record.end_s for record in records)
        found[name] = ttft_s, jct_s, gpu_s
        print(f"{name:10} TTFT {ttft_s:.3f} s, JCT {jct_s:.2f} s, {gpu_s:.0f} engine-seconds", flush=True)
    more = (ours / theirs - 1 for ours, theirs in zip(found["tetriinfer"], found["vllm"], strict=True))
    return {name: round(ratio, 3) for name, ratio in zip(("TTFT", "JCT", "engine-seconds"), more, strict=True)}


def tetriinfer_mixes(spec: ClusterSpec, requests: int) -> list[dict[str, object]]:
    """Each mix at each rate, against as many engines and against half of them."""
    mixes = {
        "light prompts, heavy answers": (LIGHT[:1], HEAVY[1:]),
        "light and heavy": ((LIGHT[0], HEAVY[0]), (LIGHT[1], HEAVY[1])),
    }
    return [
        {"mix": name, "rate_rps": rate_rps, "vllm engines": engines, "tetriinfer": f"{each}P{each}D", **figures}
        for engines, each in ENGINES
        for name, (prompts, answers) in mixes.items()
        for rate_rps in RATES_RPS
        for figures in (tetriinfer(spec, light_and_heavy(requests, rate_rps, prompts, answers), engines, each),)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--turn-s", type=float, default=8.0)
    args = parser.parse_args()
    host = replace(read_spec(CLUSTERS / "one-gpu-host.toml"), queue_requests_max=100_000, output_tokens_max=8192)
    engines = read_spec(CLUSTERS / "tetriinfer-opt13b-v100.yaml")
    figures = {
        "requests": args.requests,
        "turn_s": args.turn_s,
        "published": PUBLISHED,
        "tetriinfer over vllm": tetriinfer_mixes(engines, args.requests // 4),
        "arrow, rate over that of the trace": arrow(host, shifting(args.requests, args.turn_s)),
    }
    store("shifting-load", figures)


if __name__ == "__main__":
    main()
