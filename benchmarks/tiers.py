"""What tiers buy on real traces, simulated: prefix hits and TTFT with the arena alone, and with a tier below it.

    python benchmarks/tiers.py [--requests N] [--trace NAME] [--rate-scale K]

Four accelerators of one host (examples/clusters/one-gpu-host.toml). Writes benchmarks/results/tiers.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec import to_builtins
from msgspec.structs import replace
from record import write

from baton.metrics.summary import SloTargets, summarize
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import SimTier, read_spec
from baton.workload.load import read_trace
from baton.workload.schedule import scale_rate, spread

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT.parent / "shared" / "traces" / "mooncake"
CLUSTER = ROOT / "examples" / "clusters" / "one-gpu-host.toml"
TIERS: dict[str, tuple[SimTier, ...]] = {
    "arena alone": (),
    "file, 1.7 GB/s": (SimTier(blocks=2_000_000, bytes_per_s=1.7e9),),
    "host memory, 12 GB/s": (SimTier(name="memory", blocks=2_000_000, latency_s=0.0001, bytes_per_s=12e9),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="most requests of each trace (default 2000)")
    parser.add_argument("--trace", choices=("conversation", "synthetic"), help="only this one")
    parser.add_argument("--rate-scale", type=float, default=0.5, help="how much faster it is played (default 0.5)")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name in [options.trace] if options.trace else ("conversation", "synthetic"):
        trace = spread(read_trace(TRACES / f"{name}.first80.jsonl.gz"), 3.0)
        trace = scale_rate(replace(trace, requests=trace.requests[: options.requests]), options.rate_scale)
        for tiers, below in TIERS.items():
            spec = replace(read_spec(CLUSTER), tiers=below)
            records = replay_trace(spec, trace, policy="baton", seed=1)
            result = summarize(records, slo=SloTargets(), wall_s=0.0)
            row = {
                "trace": name,
                "tiers": tiers,
                "prefix_hit_ratio": result.prefix_hit_ratio,
                "ttft_s": to_builtins(result.ttft_s),
            }
            rows.append(row | {"completed": result.completed, "rejected": result.rejected})
    write("tiers", {"requests": options.requests, "rate_scale": options.rate_scale, "rows": rows})


if __name__ == "__main__":
    main()
