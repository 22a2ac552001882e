"""Dynamo's frontier on one node: where splitting prefill from decode begins to pay, over tokens/s per user.

    python benchmarks/published/dynamo_crossover.py [--requests N]

Published (its documentation, disaggregated serving): R1-distill Llama-70B in fp8, 8 H100, 3,000 tokens in and 150 out:
colocated is better below about 30 tokens/s per user, split gives 30 % more tokens/s per GPU at about 50. No topology is
given here: every way to use the 8 GPUs by tensor parallelism 2, 4 or 8 is played, colocated ones with several sizes of
chunks, each at rising rates until it cannot keep up (mean TTFT above 5 s, or work left behind). The frontier is the
most tokens/s per GPU of any at so many tokens/s per user, which is 1 / mean TPOT. Writes
benchmarks/results/published-dynamo-crossover.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from random import Random

from msgspec.structs import replace
from outcome import CLUSTERS, store

from baton.core.config import BatchLimits
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimKind, SimWorkers, read_spec
from baton.lab.workload.arrivals import PoissonArrivals
from baton.lab.workload.generate import synthetic_trace

GPUS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 3000, 150
DEGREES = (2, 4, 8)
CHUNKS_TOKENS = (512, 2048, 8192)
RATES_RPS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 17.0, 20.0, 24.0)
TTFT_S = 5.0
USERS_TOKENS_PER_S = (15, 20, 25, 30, 35, 40, 50, 60, 70)
Point = tuple[float, float]
"""Tokens/s per user, tokens/s per GPU."""


def systems() -> Iterator[tuple[str, str, ClusterSpec]]:
    """Yield whether it is split, a name, and the cluster."""
    mixed = read_spec(CLUSTERS / "dynamo-llama70b-8xh100-mixed.yaml")
    kinds = {f"tp{tp}": SimKind(cost={**mixed.kinds["h100"].cost, "tp": tp}) for tp in DEGREES}
    for tp, chunk in product(DEGREES, CHUNKS_TOKENS):
        workers = (SimWorkers(role="mixed", count=GPUS // tp, kind=f"tp{tp}", host="each"),)
        limits = BatchLimits(step_tokens_max=chunk, requests_max=256)
        spec = replace(mixed, workers=workers, kinds=kinds, batch=limits)
        yield "colocated", f"{GPUS // tp} x tp{tp}, chunks of {chunk}", spec
    split = read_spec(CLUSTERS / "dynamo-llama70b-8xh100-disagg.yaml")
    wire = split.kinds["tp2"].cost["wire"]
    wired = {name: SimKind(cost={**kind.cost, "wire": wire}) for name, kind in kinds.items()}
    for prefill_tp, decode_tp in product((2, 4), (2, 4)):
        for prefill in range(1, GPUS // prefill_tp):
            decode, left = divmod(GPUS - prefill * prefill_tp, decode_tp)
            if left or not decode:
                continue
            workers = (
                SimWorkers(role="prefill", count=prefill, kind=f"tp{prefill_tp}", host="each"),
                SimWorkers(role="decode", count=decode, kind=f"tp{decode_tp}", host="each"),
            )
            name = f"{prefill} x tp{prefill_tp} prefill, {decode} x tp{decode_tp} decode"
            yield "split", name, replace(split, workers=workers, kinds=wired)


def point(spec: ClusterSpec, split: str, rate_rps: float, requests: int) -> Point | None:
    """Play a rate. None where it is more than the cluster keeps up with."""
    trace = synthetic_trace(requests, (INPUT_TOKENS, OUTPUT_TOKENS), PoissonArrivals(rate_rps), Random(0))
    policy = POLICY_SETS["distserve" if split == "split" else "sarathi"]
    results = summarize(replay_trace(spec, trace, policy=policy, seed=0), slo=SloTargets(), wall_s=0.0)
    assert results.ttft_s.mean is not None
    assert results.tpot_s.mean is not None
    assert results.duration_s is not None
    span_s = trace.requests[-1].at_s
    drained_s = results.duration_s - span_s
    if results.ttft_s.mean > TTFT_S or drained_s > max(10.0, 0.5 * span_s):
        return None
    return 1 / results.tpot_s.mean, requests * OUTPUT_TOKENS / results.duration_s / GPUS


def frontier(points: dict[str, list[Point]]) -> dict[int, tuple[float, str]]:
    """Return the most tokens/s per GPU at each speed that a user may want, and what gives it."""
    best: dict[int, tuple[float, str]] = {}
    for wanted in USERS_TOKENS_PER_S:
        fast = [(gpu, name) for name, found in points.items() for user, gpu in found if user >= wanted]
        if fast:
            gpu, name = max(fast)
            best[wanted] = (round(gpu, 1), name)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    points: dict[str, dict[str, list[Point]]] = {"colocated": {}, "split": {}}
    for split, name, spec in systems():
        found: list[Point] = []
        for rate_rps in RATES_RPS:
            reached = point(spec, split, rate_rps, args.requests)
            if reached is None:
                break
            found.append(reached)
        points[split][name] = found
        print(f"{split:10} {name:36} {[(round(user), round(gpu)) for user, gpu in found]}", flush=True)
    fronts = {split: frontier(found) for split, found in points.items()}
    none = (0.0, "")
    gains = {
        wanted: round(fronts["split"].get(wanted, none)[0] / fronts["colocated"][wanted][0], 2)
        for wanted in fronts["colocated"]
    }
    pays = [wanted for wanted, gain in gains.items() if gain > 1.0]
    store(
        "dynamo-crossover",
        {
            "requests": args.requests,
            "published": {"colocated_is_better_below_tokens_per_s_user": 30, "split_over_colocated_at_50": 1.3},
            "simulated_split_pays_from_tokens_per_s_user": min(pays, default=None),
            "split_over_colocated": gains,
            "frontier": fronts,
            "points": points,
        },
    )


if __name__ == "__main__":
    main()
