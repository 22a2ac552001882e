"""Arrow's gain in shape: roles that change, under a load that shifts between prompts and answers.

    python benchmarks/published/shifting_load.py [--requests N] [--turn-s S]

Published: Arrow serves up to 2.55 times the rate of a static split within its SLO (v2 of the paper withdraws the larger
figures of v1). Here: the highest rate at which nine tenths of the requests meet TTFT 1.5 s and TPOT 0.03 s, on four
accelerators (examples/clusters/one-gpu-host.toml), long prompts with short answers and the reverse taking turns, beside
what four accelerators could do if no work went from one half of a turn into the next. Writes
benchmarks/results/published-shifting-load.json.
"""

from __future__ import annotations

import argparse
from random import Random

from msgspec.structs import replace
from outcome import CLUSTERS, store

from baton.core.config import Topology
from baton.core.types import Slo, StepShape
from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.schedule import scale_rate

SLO = Slo(ttft_s=1.5, tpot_s=0.03)
ATTAINED, RATE_STEP = 0.9, 1.05
PROMPTS, ANSWERS = (6000, 20), (250, 500)
"""Prompt and answer tokens of the two halves of a turn."""
GAPS_S = {PROMPTS: 0.085, ANSWERS: 0.020}
"""Between requests at a scale of 1: three of the four accelerators are busy with prompts, then three with answers."""
SPLITS = ((1, 3), (2, 2), (3, 1))
PUBLISHED = {"arrow over static": 2.55}


def shifting(requests: int, turn_s: float) -> Trace:
    """Let the two kinds of load take turns, each of the same length in time."""
    draw, made, at_s = Random(0), list[TraceRequest](), 0.0
    while len(made) < requests:
        kind = PROMPTS if int(at_s / turn_s) % 2 == 0 else ANSWERS
        at_s += draw.expovariate(1 / GAPS_S[kind])
        made.append(_request(at_s, kind, draw))
    return Trace(format="made", timing="absolute", requests=tuple(made))


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
    """How much faster the trace could be played if each half of a turn were alone: all are busy in the harder one.

    More is possible, for answers decode on when the next half has begun, and after the last arrival.

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--turn-s", type=float, default=8.0)
    args = parser.parse_args()
    host = replace(read_spec(CLUSTERS / "one-gpu-host.toml"), queue_requests_max=100_000, output_tokens_max=8192)
    figures = {
        "requests": args.requests,
        "turn_s": args.turn_s,
        "published": PUBLISHED,
        "arrow, rate over that of the trace": arrow(host, shifting(args.requests, args.turn_s)),
    }
    store("shifting-load", figures)


if __name__ == "__main__":
    main()
