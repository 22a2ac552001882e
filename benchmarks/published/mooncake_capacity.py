"""Mooncake's capacity (FAST 2025, section 5.2): requests of a trace in time, against vLLM on the same 16 nodes.

    python benchmarks/published/mooncake_capacity.py [--trace conversation|synthetic] [--limit N] [--rate-scale K]
        [--slices S]

A request counts when its TTFT is at most 30 s and the mean of the longest tenth of its gaps between tokens is below the
limit. Published, more requests than the best vLLM at limits of 100, 200 and 300 ms: conversation +498, +157, +59 %;
synthetic +62, +40, +28 %. vLLM 0.5.1 puts whole prompts before decodes, or (its other variant) mixes chunks of them
with decodes. A seed changes nothing but the delays of messages here, for the requests are the trace's: what varies is
which of them, so --slices plays S runs of N requests, one after the other in the trace. Writes
benchmarks/results/published-mooncake-capacity-TRACE.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from msgspec.structs import replace
from outcome import CLUSTERS, TRACES, store
from systems import PROMPTS_FIRST, with_cost

from baton.core.config import BatchLimits, PolicyConfig
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimWorkers, read_spec
from baton.lab.workload.load import read_trace
from baton.lab.workload.request import Trace
from baton.lab.workload.schedule import cut_trace, scale_rate, spread_arrivals

TTFT_S = 30.0
LIMITS_S = (0.1, 0.2, 0.3)
PUBLISHED = {"conversation": (4.98, 1.57, 0.59), "synthetic": (0.62, 0.40, 0.28)}
CHUNK_TOKENS = 512
SPLITS = ((8, 8), (10, 6))


def gaps_s(record: RequestRecord) -> float:
    """Mean of the longest tenth of the gaps between tokens; 0 of a single token."""
    gaps = np.sort(np.diff(np.asarray(record.token_times_s)))
    return float(gaps[-max(1, len(gaps) // 10) :].mean()) if len(gaps) else 0.0


def in_time(records: Sequence[RequestRecord]) -> tuple[int, ...]:
    """Count the requests within the TTFT and each limit of gaps."""
    waits = [
        gaps_s(record)
        for record in records
        if record.outcome == "finished" and record.ttft_s is not None and record.ttft_s <= TTFT_S
    ]
    return tuple(sum(wait < limit_s for wait in waits) for limit_s in LIMITS_S)


def systems(engine: str) -> dict[str, tuple[ClusterSpec, PolicyConfig]]:
    mixed = with_cost(read_spec(CLUSTERS / "mooncake-16x8-a800-mixed.yaml"), {"engine": engine})
    apart = with_cost(read_spec(CLUSTERS / "mooncake-16x8-a800.yaml"), {"engine": engine})
    chunks = BatchLimits(step_tokens_max=CHUNK_TOKENS, requests_max=mixed.batch.requests_max)
    found = {
        "vLLM, prompts first": (mixed, PROMPTS_FIRST),
        "vLLM, chunks": (replace(mixed, batch=chunks), POLICY_SETS["sarathi"]),
    }
    for prefill, decode in SPLITS:
        workers = (
            SimWorkers(role="prefill", count=prefill, kind="node", host="each"),
            SimWorkers(role="decode", count=decode, kind="node", host="each"),
        )
        found[f"Mooncake {prefill}P{decode}D"] = (replace(apart, workers=workers), POLICY_SETS["cache-aware-global"])
    return found


def play_slice(trace: Trace, engine: str) -> dict[str, object]:
    """Play one run of requests on every system."""
    counts: dict[str, tuple[int, ...]] = {}
    mean_ttft_s: dict[str, float] = {}
    for name, (spec, policy) in systems(engine).items():
        records = replay_trace(spec, trace, policy=policy, seed=0)
        counts[name] = in_time(records)
        mean_ttft_s[name] = fmean(record.ttft_s for record in records if record.ttft_s is not None)
        print(f"{name:22} in time {counts[name]} of {len(records)}, TTFT {mean_ttft_s[name]:.1f} s", flush=True)
    best_vllm = [max(counts[name][place] for name in counts if "vLLM" in name) for place in range(len(LIMITS_S))]
    best_ours = [max(counts[name][place] for name in counts if "Mooncake" in name) for place in range(len(LIMITS_S))]
    return {
        "in_time": counts,
        "mean_ttft_s": mean_ttft_s,
        "gain_over_prompts_first_ratio": _gains(best_ours, counts["vLLM, prompts first"]),
        "gain_over_best_vllm_ratio": _gains(best_ours, best_vllm),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=list(PUBLISHED), default="conversation")
    parser.add_argument("--limit", type=int, default=3000)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--rate-scale", type=float, default=1.0)
    parser.add_argument("--engine", default="splitwise-vllm", help="overheads of both systems; `ideal` has none")
    args = parser.parse_args()
    whole = read_trace(TRACES / "mooncake" / f"{args.trace}.first80.jsonl.gz", limit=args.limit * args.slices)
    slices: list[dict[str, object]] = []
    for place in range(args.slices):
        some = replace(whole, requests=whole.requests[place * args.limit : (place + 1) * args.limit])
        trace = cut_trace(some, start_s=0.0, duration_s=None, skip=0)
        trace = scale_rate(spread_arrivals(trace, 3.0) if args.trace == "conversation" else trace, args.rate_scale)
        slices.append(play_slice(trace, args.engine))
    store(
        f"mooncake-capacity-{args.trace}",
        {
            "requests": args.limit,
            "rate_scale": args.rate_scale,
            "engine": args.engine,
            "ttft_limit_s": TTFT_S,
            "gap_limits_s": LIMITS_S,
            "published_gain_ratio": PUBLISHED[args.trace],
            "simulated_by_slice": slices,
        },
    )


def _gains(ours: Sequence[int], theirs: Sequence[int]) -> list[float | None]:
    return [round(mine / other - 1, 2) if other else None for mine, other in zip(ours, theirs, strict=True)]


if __name__ == "__main__":
    main()
