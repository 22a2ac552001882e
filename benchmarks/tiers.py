"""What tiers buy on real traces, simulated: prefix hits and TTFT with the arena alone, and with a tier below it.

Four accelerators on one host, with and without a tier of its own; and on four hosts with as many KV blocks together,
with and without a pool that all of them share.

    python benchmarks/tiers.py [--requests N] [--trace NAME] [--rate-scale K]

The accelerators are those of examples/clusters/one-gpu-host.toml. Writes benchmarks/results/tiers-TRACE.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec import to_builtins
from msgspec.structs import replace
from record import write

from baton.core.config import Topology
from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimTier, SimWorkers, read_spec
from baton.lab.workload.load import read_trace
from baton.lab.workload.schedule import scale_rate, spread_arrivals

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT.parent / "shared" / "traces" / "mooncake"
CLUSTER = ROOT / "examples" / "clusters" / "one-gpu-host.toml"
HOSTS = 4
BLOCKS = 2_000_000
MEMORY = SimTier(name="memory", blocks=BLOCKS, latency_s=0.0001, bytes_per_s=12e9)
POOL = SimTier(name="pool", blocks=BLOCKS, shared=True)


def clusters() -> dict[tuple[str, str], ClusterSpec]:
    """Make every cluster, by its hosts and its tiers."""
    one = read_spec(CLUSTER)
    workers = SimWorkers(role="mixed", count=HOSTS, host="each")
    kv = replace(one.kv, blocks=one.kv.blocks // HOSTS)
    four = replace(one, topology=Topology(), workers=(workers,), kv=kv)
    own = replace(MEMORY, blocks=BLOCKS // HOSTS)
    return {
        ("one host", "arena alone"): one,
        ("one host", "file, 1.7 GB/s"): replace(one, tiers=(SimTier(blocks=BLOCKS),)),
        ("one host", "host memory, 12 GB/s"): replace(one, tiers=(MEMORY,)),
        ("four hosts", "arenas alone"): four,
        ("four hosts", "memory of each, 12 GB/s"): replace(four, tiers=(own,)),
        ("four hosts", "pool of all, 3 GB/s"): replace(four, tiers=(replace(POOL, bytes_per_s=3e9),)),
        ("four hosts", "pool of all, 12 GB/s"): replace(four, tiers=(replace(POOL, bytes_per_s=12e9),)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="most requests of each trace (default 2000)")
    parser.add_argument("--trace", choices=("conversation", "synthetic"), help="only this one")
    parser.add_argument("--rate-scale", type=float, default=0.5, help="how much faster it is played (default 0.5)")
    options = parser.parse_args()
    for name in [options.trace] if options.trace else ("conversation", "synthetic"):
        trace = spread_arrivals(read_trace(TRACES / f"{name}.first80.jsonl.gz"), 3.0)
        trace = scale_rate(replace(trace, requests=trace.requests[: options.requests]), options.rate_scale)
        rows: list[dict[str, object]] = []
        for (hosts, tiers), spec in clusters().items():
            records = replay_trace(spec, trace, policy="baton", seed=1)
            result = summarize(records, slo=SloTargets(), wall_s=0.0)
            row = {
                "trace": name,
                "hosts": hosts,
                "tiers": tiers,
                "prefix_hit_ratio": result.prefix_hit_ratio,
                "ttft_s": to_builtins(result.ttft_s),
            }
            rows.append(row | {"completed": result.completed, "rejected": result.rejected})
        write(f"tiers-{name}", {"requests": options.requests, "rate_scale": options.rate_scale, "rows": rows})


if __name__ == "__main__":
    main()
