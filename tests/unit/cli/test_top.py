"""The screen of `baton top`."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from baton.cli.top import screen
from baton.serve.live.history import Sample, WorkerSample
from baton.serve.live.recent import Spread
from baton.serve.live.status import ClusterStatus, HostStatus, TierStatus, WorkerStatus

TIER = TierStatus(
    name="disk",
    kv_blocks_total=100,
    kv_blocks_cached=10,
    kv_blocks_writing=0,
    loaded_blocks=0,
    missed_blocks=0,
    latency_s=0.001,
    block_load_s=0.0001,
    is_measured=False,
)


def status(tier: TierStatus) -> ClusterStatus:
    return ClusterStatus(
        workers=(
            WorkerStatus(
                id="prefill-0",
                role="prefill",
                pid=7,
                state="ready",
                running=3,
                waiting=2,
                kv_blocks_used=5,
                kv_blocks_total=10,
                host="own",
            ),
        ),
        hosts=(
            HostStatus(
                id="own",
                kv_blocks_total=10,
                kv_blocks_free=5,
                kv_blocks_used=5,
                kv_blocks_cached=0,
                kv_block_tokens=16,
                kv_block_bytes=1024,
                tiers=(tier,),
            ),
        ),
        policy={},
    )


def sample(*, ttft_s: float | None, busy_ratio: float) -> Sample:
    return Sample(
        unix_s=1.0,
        elapsed_s=2.0,
        state="ready",
        latencies={} if ttft_s is None else {"ttft": Spread(ttft_s, ttft_s, 2 * ttft_s)},
        counts={"prompt_tokens": 400, "cached_tokens": 100, "output_tokens": 50, "finished": 3},
        rejected={"queue_full": 1},
        tenants={},
        classes={},
        handoffs=(),
        copies=(),
        workers=(
            WorkerSample(
                id="prefill-0",
                host="own",
                role="prefill",
                state="ready",
                running=3,
                waiting=2,
                steps=10,
                step_requests=2.5,
                busy_ratio=busy_ratio,
            ),
        ),
        hosts=(),
        ended=(),
        marks=(),
    )


def shown(tier: TierStatus) -> str:
    window = [
        sample(ttft_s=0.1, busy_ratio=0.5),
        sample(ttft_s=None, busy_ratio=1.0),
        sample(ttft_s=0.3, busy_ratio=0.9),
    ]
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(screen("m", status(tier), window))
    return console.export_text()


def test_the_figures_are_those_of_the_last_samples() -> None:
    text = shown(TIER)
    assert "m: ready; in 6 s: 1.5 requests/s finished, 3 rejected, 200 prompt tokens/s, 25% of them cached" in text
    assert "25 output tokens/s" in text
    ttft = next(line for line in text.splitlines() if " TTFT " in line)
    assert [cell.strip() for cell in ttft.split("│")[2:5]] == ["200.0", "400.0", "600.0"]
    worker = next(line for line in text.splitlines() if "prefill-0" in line)
    assert [cell.strip() for cell in worker.split("│")[6:11]] == ["3", "2", "5.0", "80%", "5"]


def test_times_of_a_tier_are_shown_once_they_are_measured() -> None:
    assert "no read was timed yet" in shown(TIER)
    measured = shown(msgspec.structs.replace(TIER, is_measured=True))
    assert "a read takes 1.0 ms and 0.10 ms a block" in measured
