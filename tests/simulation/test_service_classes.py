"""Service classes on a simulated fleet: what a saturating class leaves to a premium one, and that neither starves."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

from msgspec.structs import replace

from baton.core.class_config import ClassConfig, RouteConfig
from baton.core.config import BatchLimits, PolicyConfig, Topology
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.cells import CellJob
from baton.lab.sim.replay_trace import play_cell
from baton.lab.sim.spec import ClusterSpec, SimKV
from baton.lab.workload.request import Trace, TraceRequest

PREMIUM = ClassConfig(name="premium", priority=-1, prefill_ratio=0.9, decode_ratio=0.5, kv_ratio=0.5, aging_s=1000.0)
FREE = ClassConfig(name="free", priority=0, aging_s=1000.0)
ROUTES = (RouteConfig(service_class="premium", tenant="premium"), RouteConfig(service_class="free", tenant="free"))
PAIR = Topology(prefill=1, decode=1)


def spec(
    topology: Topology = PAIR, *, classes: Sequence[ClassConfig] = (PREMIUM, FREE), blocks: int = 400
) -> ClusterSpec:
    return ClusterSpec(
        topology=topology,
        kv=SimKV(blocks=blocks, block_tokens=16),
        batch=BatchLimits(step_tokens_max=256, requests_max=8),
        classes=tuple(classes),
        routes=ROUTES if classes else (),
        output_tokens_max=64,
    )


def premium(count: int = 20) -> list[TraceRequest]:
    return [
        TraceRequest(at_s=5.0 + 3.0 * n, input_tokens=100, output_tokens=20, tenant="premium") for n in range(count)
    ]


def free(count: int = 300) -> list[TraceRequest]:
    """Far more than the fleet serves."""
    return [TraceRequest(at_s=0.05 * n, input_tokens=200, output_tokens=60, tenant="free") for n in range(count)]


def play(cluster: ClusterSpec, *requests: TraceRequest) -> list[RequestRecord]:
    trace = Trace(format="made", timing="absolute", requests=tuple(sorted(requests, key=lambda each: each.at_s)))
    records = play_cell(CellJob(spec=cluster, trace=trace, policy=PolicyConfig(), seed=0, slo=None))
    assert {record.outcome for record in records} == {"finished"}
    return records


def worst_ttft_s(records: Sequence[RequestRecord], tenant: str) -> float:
    """Return the 99th percentile."""
    found = [record.token_times_s[0] - record.arrival_s for record in records if record.tenant == tenant]
    return quantiles(found, n=100)[98]


def test_a_saturating_class_hardly_delays_a_premium_one() -> None:
    idle_s = worst_ttft_s(play(spec(), *premium()), "premium")
    assert worst_ttft_s(play(spec(), *premium(), *free()), "premium") <= 1.5 * idle_s
    assert worst_ttft_s(play(spec(classes=()), *premium(), *free()), "premium") > 5 * idle_s, "what classes prevent"


def test_a_full_arena_gives_reserved_blocks_back_between_two_steps() -> None:
    """By preemption: the first token waits for one or two steps more than on an idle worker."""
    mixed = spec(Topology(mixed=1), blocks=100)
    idle_s = worst_ttft_s(play(mixed, *premium()), "premium")
    assert worst_ttft_s(play(mixed, *premium(), *free(100)), "premium") <= 3 * idle_s
    shared = spec(Topology(mixed=1), blocks=100, classes=(replace(PREMIUM, kv_ratio=0.0), FREE))
    assert worst_ttft_s(play(shared, *premium(), *free(100)), "premium") > 3 * idle_s, "what the reserve prevents"


def test_the_reserve_of_an_idle_class_is_lent() -> None:
    """The free class gets as much done as it would without classes."""

    def end_s(cluster: ClusterSpec) -> float:
        return max(record.end_s for record in play(cluster, *free(100)))

    reserving = replace(PREMIUM, prefill_ratio=0.5)  # shorter steps cost throughput, so not nine tenths of each
    assert end_s(spec(classes=(reserving, FREE))) <= 1.05 * end_s(spec(classes=()))


def test_a_waiting_class_grows_more_urgent() -> None:
    """A premium class that saturates the fleet does not starve the free one beyond its aging."""
    flood = [replace(each, tenant="premium") for each in free(200)]
    late = TraceRequest(at_s=1.0, input_tokens=100, output_tokens=20, tenant="free")

    def wait_s(aging_s: float) -> float:
        classes = (replace(PREMIUM, decode_ratio=0.0), replace(FREE, aging_s=aging_s))
        return worst_ttft_s([*play(spec(classes=classes), *flood, late, late)], "free")

    assert wait_s(5.0) < 30.0 < wait_s(1000.0)
