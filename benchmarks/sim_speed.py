"""How fast the simulator is: requests of the Azure conversation trace per second of wall time, 1P1D to 2P2D.

    python benchmarks/sim_speed.py --trace FILE [--limit N]

FILE is the conversation trace of AzurePublicDataset, 2023 (CSV, may be gzip). Writes benchmarks/results/sim-speed.json.
Without a trace, requests of similar lengths and times are drawn, and sim-speed-synthetic.json is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

from msgspec.structs import replace
from record import write

from baton.core.config import Topology
from baton.metrics.summary import SloTargets, summarize
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import load_spec
from baton.workload.arrivals import PoissonArrivals
from baton.workload.lengths import UniformLengths, synthetic_trace
from baton.workload.load import read_trace
from baton.workload.request import Trace

CLUSTER = Path(__file__).resolve().parent.parent / "examples" / "clusters" / "one-gpu-host.toml"
TOPOLOGIES = ((1, 1), (2, 1), (1, 2), (2, 2))
RUNS = 3


def load_requests(path: Path | None, limit: int) -> Trace:
    """Read the trace, or draw one: 5 requests a second, 100 to 2,000 tokens in, 50 to 450 out."""
    if path is not None:
        return read_trace(path, limit=limit)
    lengths = UniformLengths(input_tokens=(100, 2000), output_tokens=(50, 450))
    return synthetic_trace(limit, lengths, PoissonArrivals(5.0), Random(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--limit", type=int, default=1000)
    args = parser.parse_args()
    spec, trace = load_spec(CLUSTER.read_text()), load_requests(args.trace, args.limit)
    figures = {}
    for prefill, decode in TOPOLOGIES:
        shaped = replace(spec, topology=Topology(prefill=prefill, decode=decode))
        walls_s, virtual_s = [], 0.0
        for _ in range(RUNS):
            started_s = perf_counter()
            records = replay_trace(shaped, trace, policy="baton", seed=0)
            walls_s.append(perf_counter() - started_s)
            results = summarize(records, slo=SloTargets(), wall_s=walls_s[-1])
            virtual_s = results.duration_s or 0.0
        wall_s = median(walls_s)
        tokens = sum(record.output_tokens for record in records)
        figures[f"{prefill}P{decode}D"] = {
            "requests": len(records),
            "completed": results.completed,
            "wall_s": round(wall_s, 3),
            "requests_per_wall_s": round(len(records) / wall_s, 1),
            "output_tokens_per_wall_s": round(tokens / wall_s, 1),
            "virtual_s_per_wall_s": round(virtual_s / wall_s, 1),
            "ttft_p50_s": results.ttft_s.p50,
            "tpot_p50_s": results.tpot_s.p50,
        }
    source = args.trace.name if args.trace is not None else "synthetic"
    name = "sim-speed" if args.trace is not None else "sim-speed-synthetic"
    write(name, {"trace": f"{source}, first {args.limit} requests", "runs": RUNS, "median_of": figures})


if __name__ == "__main__":
    main()
