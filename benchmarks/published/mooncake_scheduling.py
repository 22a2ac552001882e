"""Mooncake's scheduling ablation (FAST 2025, figure 5): mean TTFT of four ways to choose the prefill node.

    python benchmarks/published/mooncake_scheduling.py [--limit N]

Published, on 16 nodes and the conversation trace: random 19.65 s, load balancing 5.27, local cache-aware 3.58, global
cache-aware 3.07. Writes benchmarks/results/published-mooncake-scheduling.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outcome import CLUSTERS, TRACES, store

from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import read_spec
from baton.lab.workload.load import read_trace

PUBLISHED_S = {"random": 19.65, "distserve": 5.27, "cache-aware-local": 3.58, "cache-aware-global": 3.07}
"""By our name of the policy; `distserve` routes by the shortest queue, which is the paper's load balancing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACES / "mooncake" / "conversation.first80.jsonl.gz")
    parser.add_argument("--limit", type=int, help="the first N requests only")
    args = parser.parse_args()
    spec = read_spec(CLUSTERS / "mooncake-16x8-a800.yaml")
    trace = read_trace(args.trace, limit=args.limit)
    simulated: dict[str, float] = {}
    hits: dict[str, float | None] = {}
    for name in PUBLISHED_S:
        results = summarize(replay_trace(spec, trace, policy=name, seed=0), slo=SloTargets(), wall_s=0.0)
        simulated[name], hits[name] = round(results.ttft_s.mean or 0.0, 3), results.prefix_hit_ratio
        print(f"{name:20} mean TTFT {simulated[name]:7.2f} s   published {PUBLISHED_S[name]:6.2f} s", flush=True)
    best, published = simulated["cache-aware-global"], PUBLISHED_S["cache-aware-global"]
    store(
        "mooncake-scheduling",
        {
            "trace": args.trace.name,
            "requests": len(trace.requests),
            "published_mean_ttft_s": PUBLISHED_S,
            "simulated_mean_ttft_s": simulated,
            "published_over_global": {name: round(value / published, 2) for name, value in PUBLISHED_S.items()},
            "simulated_over_global": {name: round(value / best, 2) for name, value in simulated.items()},
            "prefix_hit_ratio": hits,
        },
    )


if __name__ == "__main__":
    main()
