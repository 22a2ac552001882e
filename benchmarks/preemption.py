"""What becomes of requests that give way in a short arena, simulated: computed again, or read from a tier below it.

One mixed worker, of two kinds: an accelerator with an 8B model (prices of examples/clusters/one-gpu-host.toml), and the
embedded model on two cores (rounded from docs/benchmarks.md); each without a tier, with a fast one and a slow one.
Long answers on an arena that holds about six of them, so that the youngest give way again and again.

    python benchmarks/preemption.py [--requests N]

Writes benchmarks/results/preemption.json, and its table to standard output.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import get_args

from msgspec import to_builtins
from msgspec.structs import replace
from record import table, write

from baton.core.config import BatchLimits, Topology
from baton.core.kv_config import Preemption
from baton.core.messages import RequestDropped
from baton.core.tier_messages import FromTier, LoadEnded
from baton.decide.control.cluster_messages import WorkerSaid
from baton.decide.control.decision_log import Decision
from baton.lab.report.summary import Results, SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimCost, SimKV, SimTier, read_spec
from baton.lab.workload.request import Trace, TraceRequest

ROOT = Path(__file__).resolve().parent.parent
GPU_HOST = ROOT / "examples" / "clusters" / "one-gpu-host.toml"
BLOCKS = 600
"""Of 16 tokens. The mean request ends with 98 of them."""
TIER_BLOCKS = 100_000
EMBEDDED = SimCost(step_overhead_s=0.020, prefill_token_s=0.00115, decode_request_s=0.002, context_token_s=0.000002)
SMOLLM2_TOKEN_BYTES = 23_040
"""30 layers x 2 x 3 heads x 64 numbers of 2 bytes."""


@dataclass(slots=True)
class Tap:
    """Counts what happens in the pool."""

    preemptions: int = 0
    read_blocks: int = 0

    def take(self, decision: Decision) -> None:
        match decision.event:
            case WorkerSaid(events=events):
                self.preemptions += sum(isinstance(event, RequestDropped) and event.preempted for event in events)
            case FromTier(event=LoadEnded(whole=whole)):
                self.read_blocks += sum(whole)
            case _:
                pass


def cases() -> Iterator[tuple[str, str, ClusterSpec, float]]:
    """Yield what serves, what is below its arena, the cluster of both, and requests/s."""
    shape = {"topology": Topology(mixed=1), "kv": SimKV(blocks=BLOCKS), "queue_requests_max": 100_000}
    memory = SimTier(blocks=TIER_BLOCKS, bytes_per_s=12e9, latency_s=0.0001)
    file = SimTier(blocks=TIER_BLOCKS, bytes_per_s=1.7e9, latency_s=0.001)
    far = SimTier(blocks=TIER_BLOCKS, bytes_per_s=2e6, latency_s=0.1)
    gpu = replace(read_spec(GPU_HOST), **shape)
    embedded = ClusterSpec(cost=EMBEDDED, batch=BatchLimits(step_tokens_max=512), **shape)
    yield "accelerator, 8B", "nothing", gpu, 1.5
    yield "accelerator, 8B", "host memory, 12 GB/s", replace(gpu, tiers=(memory,)), 1.5
    yield "accelerator, 8B", "file, 1.7 GB/s", replace(gpu, tiers=(file,)), 1.5
    yield "embedded, 2 cores", "nothing", embedded, 0.2
    for name, tier in (("file, 1.7 GB/s", file), ("far store, 2 MB/s", far)):
        small = replace(tier, token_bytes=SMOLLM2_TOKEN_BYTES)
        yield "embedded, 2 cores", name, replace(embedded, tiers=(small,)), 0.2


def workload(requests: int, rate_rps: float) -> Trace:
    """Prompts of 200 to 1,000 tokens, answers of 400 to 1,500, Poisson arrivals. No two share a block."""
    draw, at_s, made = Random(1), 0.0, list[TraceRequest]()
    for index in range(requests):
        at_s += draw.expovariate(rate_rps)
        lengths = {"input_tokens": draw.randint(200, 1000), "output_tokens": draw.randint(400, 1500)}
        made.append(TraceRequest(at_s=at_s, prefix_ids=(index,), prefix_block_tokens=1000, **lengths))
    return Trace(format="made", timing="absolute", requests=tuple(made))


def play(spec: ClusterSpec, trace: Trace) -> tuple[Results, Tap]:
    tap = Tap()
    records = replay_trace(spec, trace, policy="baton", seed=1, tap=tap.take)
    return summarize(records, slo=SloTargets(), wall_s=0.0), tap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="requests of each run (default 100)")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    lines: list[list[str]] = []
    for worker, below, spec, rate_rps in cases():
        trace = workload(options.requests, rate_rps)
        ways: Sequence[Preemption] = get_args(Preemption) if spec.tiers else ("recompute",)
        for way in ways:
            result, tap = play(replace(spec, preemption=way), trace)
            case = {"worker": worker, "below": below, "preemption": way, "rate_rps": rate_rps}
            counts = {"preemptions": tap.preemptions, "read_blocks": tap.read_blocks, "completed": result.completed}
            rows.append(case | counts | {"tpot_s": to_builtins(result.tpot_s), "e2e_s": to_builtins(result.e2e_s)})
            tpot_ms = [1000 * (value or 0.0) for value in (result.tpot_s.mean, result.tpot_s.p90, result.tpot_s.p99)]
            shown = " / ".join(f"{value:.1f}" for value in tpot_ms)
            whole = f"{result.e2e_s.mean or 0.0:.1f} / {result.e2e_s.p90 or 0.0:.1f}"
            lines.append([worker, below, way, f"{tap.preemptions:,}", f"{tap.read_blocks:,}", shown, whole])
    write("preemption", {"requests": options.requests, "rows": rows})
    heads = ["", "below", "preemption", "gave way", "blocks read", "TPOT mean / p90 / p99, ms", "E2E mean / p90, s"]
    print(table(heads, lines))


if __name__ == "__main__":
    main()
