"""Mooncake's early rejection (arXiv 2407.00079, section 7): requests that are refused, with and without prediction.

    python benchmarks/published/early_rejection.py [--limit N] [--rate-scale K] [--prefill P] [--ttft-slo-s T]
        [--tpot-slo-s T] [--policy NAME ...] [--name NAME]

Published, 8 prefill and 8 decode nodes, 23,000 requests replayed at twice their speed: 4,183 refused by a baseline that
rejects before decode, 3,771 by early rejection, 3,589 with prediction. That trace was not obtained; here the
conversation trace is replayed so fast that the cluster is overloaded, under a TPOT that decode can hardly keep. There,
a node that is to decode looks once more when the prompt is computed, and may refuse then; our port has no refusal after
prefill, so the baseline is not simulated, and who would be refused then is told as late: its tokens come slower than
promised. With --prefill, P of the 16 nodes prefill, not 8: of many, decode is what is short, and refuses. Writes
benchmarks/results/published-early-rejection[-PpDd][-NAME].json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from msgspec.structs import replace
from outcome import CLUSTERS, TRACES, store

from baton.core.types import Slo
from baton.lab.report.summary import RequestRecord, SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import SimWorkers, read_spec
from baton.lab.workload.load import read_trace
from baton.lab.workload.schedule import scale_rate, spread_arrivals

PUBLISHED = {"mooncake-no-prediction": 3771, "mooncake": 3589}
NAMES = (*PUBLISHED, "baton")
NODES = 16


def outcome(records: Sequence[RequestRecord], slo: Slo) -> dict[str, float | None]:
    """Count who was refused, whose tokens were slower than promised, and the share that was served in time."""
    results = summarize(records, slo=SloTargets(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s), wall_s=0.0)
    slow = sum(record.tpot_s is not None and record.tpot_s > slo.tpot_s for record in records)
    return {
        "refused": results.rejected,
        "slow": slow,
        "refused_or_slow": results.rejected + slow,
        "attainment_ratio": results.slo.attainment_ratio,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=1500)
    parser.add_argument("--rate-scale", type=float, default=4.0)
    parser.add_argument("--prefill", type=int, default=NODES // 2)
    parser.add_argument("--ttft-slo-s", type=float, default=15.0)
    parser.add_argument("--tpot-slo-s", type=float, default=0.026)
    parser.add_argument("--policy", action="append", choices=NAMES)
    parser.add_argument("--name", default="", help="more of the result file's name, such as the SLO")
    args = parser.parse_args()
    slo = Slo(ttft_s=args.ttft_slo_s, tpot_s=args.tpot_slo_s)
    prefill, decode = args.prefill, NODES - args.prefill
    workers = (
        SimWorkers(role="prefill", count=prefill, kind="node", host="each"),
        SimWorkers(role="decode", count=decode, kind="node", host="each"),
    )
    spec = replace(read_spec(CLUSTERS / "mooncake-16x8-a800.yaml"), workers=workers)
    trace = read_trace(TRACES / "mooncake" / "conversation.first80.jsonl.gz", limit=args.limit)
    trace = scale_rate(spread_arrivals(trace, 3.0), args.rate_scale)
    found = {
        name: outcome(replay_trace(spec, trace, policy=name, seed=0, slo=slo), slo) for name in args.policy or NAMES
    }
    for name, counts in found.items():
        print(f"{name:24} {counts}", flush=True)
    split = [] if prefill == NODES // 2 else [f"{prefill}p{decode}d"]
    store(
        "-".join(["early-rejection", *split, *args.name.split()]),
        {
            "requests": len(trace.requests),
            "rate_scale": args.rate_scale,
            "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
            "published_refused_of_23000": {"baseline": 4183, **PUBLISHED},
            "simulated": found,
        },
    )


if __name__ == "__main__":
    main()
