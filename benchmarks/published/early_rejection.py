"""Mooncake's early rejection (arXiv 2407.00079, section 7): requests that are refused, with and without prediction.

    python benchmarks/published/early_rejection.py [--limit N] [--rate-scale K] [--prefill P]

Published, 8 prefill and 8 decode nodes, 23,000 requests replayed at twice their speed: 4,183 refused by a baseline that
rejects before decode, 3,771 by early rejection, 3,589 with prediction. That trace was not obtained; here the
conversation trace is replayed so fast that the cluster is overloaded, under a TPOT that decode can hardly keep. Our
port has no refusal after prefill, so the baseline is not simulated. With --prefill, P of the 16 nodes prefill, not 8:
of many, decode is what is short, and refuses. Writes benchmarks/results/published-early-rejection[-PpDd].json.
"""

from __future__ import annotations

import argparse

from msgspec.structs import replace
from outcome import CLUSTERS, TRACES, store

from baton.core.types import Slo
from baton.metrics.summary import SloTargets, summarize
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import SimWorkers, read_spec
from baton.workload.load import read_trace
from baton.workload.schedule import scale_rate, spread

SLO = Slo(ttft_s=15.0, tpot_s=0.026)
PUBLISHED = {"mooncake-no-prediction": 3771, "mooncake": 3589}
NAMES = (*PUBLISHED, "baton")
NODES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=1500)
    parser.add_argument("--rate-scale", type=float, default=4.0)
    parser.add_argument("--prefill", type=int, default=NODES // 2)
    args = parser.parse_args()
    prefill, decode = args.prefill, NODES - args.prefill
    workers = (
        SimWorkers(role="prefill", count=prefill, kind="node", host="each"),
        SimWorkers(role="decode", count=decode, kind="node", host="each"),
    )
    spec = replace(read_spec(CLUSTERS / "mooncake-16x8-a800.yaml"), workers=workers)
    trace = read_trace(TRACES / "mooncake" / "conversation.first80.jsonl.gz", limit=args.limit)
    trace = scale_rate(spread(trace, 3.0), args.rate_scale)
    rejected: dict[str, int] = {}
    attained: dict[str, float | None] = {}
    for name in NAMES:
        records = replay_trace(spec, trace, policy=name, seed=0, slo=SLO)
        results = summarize(records, slo=SloTargets(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s), wall_s=0.0)
        rejected[name], attained[name] = results.rejected, results.slo.attainment_ratio
        print(f"{name:24} refused {results.rejected:5} of {results.requests}, {attained[name]} in SLO", flush=True)
    store(
        "early-rejection" if prefill == NODES // 2 else f"early-rejection-{prefill}p{decode}d",
        {
            "requests": len(trace.requests),
            "rate_scale": args.rate_scale,
            "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
            "published_refused_of_23000": {"baseline": 4183, **PUBLISHED},
            "simulated_refused": rejected,
            "simulated_attainment_ratio": attained,
        },
    )


if __name__ == "__main__":
    main()
