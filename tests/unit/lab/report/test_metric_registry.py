"""The exposition has exactly the names and labels of the contract, and counts what it was given."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.types import HostId, HostView, WorkerId, WorkerView
from baton.decide.metrics import catalog
from baton.serve.live.metrics_registry import Metrics, render

CONTRACT = """
baton_time_to_first_token_seconds baton_inter_token_latency_seconds baton_time_per_output_token_seconds
baton_e2e_request_latency_seconds baton_request_queue_seconds baton_request_prefill_seconds baton_handoff_seconds
baton_handoff_bytes_total baton_requests_total{outcome} baton_requests_rejected_total{reason}
baton_requests_in_slo_total baton_requests_running{worker,role} baton_requests_waiting{worker,role}
baton_kv_blocks{host,tier,state} baton_prefix_query_tokens_total baton_prefix_hit_tokens_total
baton_preemptions_total baton_failovers_total baton_role_flips_total baton_step_seconds{role}
""".split()  # noqa: SIM905 (as it stands in the design)
BESIDE = [
    "baton_speculation_drafted_tokens_total",
    "baton_speculation_accepted_tokens_total",
    "baton_tier_blocks_total{host,tier,outcome}",
    "baton_tier_rests_total{host,tier}",
    "baton_handoff_layer_bytes_total",
    "baton_live_moves_total",
    "baton_read_back_blocks_total{host,tier}",
    "baton_http_refusals_total{status,reason}",
    "baton_prediction_error_ratio{latency}",
    "baton_step_error_ratio{worker,role}",
    "baton_class_requests_total{class,outcome}",
    "baton_class_time_to_first_token_seconds{class}",
    "baton_generation_tokens_total",
    "baton_resumed_streams_total{outcome}",
    "baton_unlogged_decisions_total",
    "baton_finish_reasons_total{reason}",
    "baton_failover_tokens_total{kv}",
    "baton_decode_queue_seconds",
    "baton_handoff_copy_seconds_total{during}",
    "baton_class_tokens_total{class,kind}",
    "baton_tenant_requests_total{tenant,outcome}",
    "baton_tenant_tokens_total{tenant,kind}",
    "baton_kv_usage_ratio{host}",
    "baton_prompts_total{kind}",
]
"""What we tell beyond it. A name that is once told is kept."""


def samples(metrics: Metrics) -> dict[str, float]:
    """Every exposed line: `name{label="value"}` to its value."""
    lines = render(metrics, {"hash": metrics}).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_the_catalog_is_the_contract() -> None:
    spelled = [
        metric.name + (f"{{{','.join(label.name for label in metric.labels)}}}" if metric.labels else "")
        for metric in catalog.METRICS
    ]
    assert spelled == CONTRACT + BESIDE


def test_the_exposition_parses_and_adds_no_name() -> None:
    """Names of families are those of the catalogue; nothing like `_created` comes with them."""
    metrics = Metrics()
    metrics.set_workers([WorkerView(id=WorkerId("w0"), host=HostId("h0"), role="mixed")])
    metrics.set_blocks(
        [("host", HostView(id=HostId("h0"), blocks_total=0, blocks_free=0, blocks_used=0, blocks_cached=0))]
    )
    text = render(metrics, {"hash": metrics}).decode()
    typed = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert typed == [name.partition("{")[0] for name in CONTRACT + BESIDE]
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    suffixes = ("", "_bucket", "_count", "_sum")
    assert names <= {name + suffix for name in typed for suffix in suffixes}


def test_what_was_never_counted_is_exposed_as_zero() -> None:
    """A rate over a series that does not exist yet is a gap in a graph."""
    shown = samples(Metrics())
    assert shown["baton_handoff_bytes_total"] == 0
    assert shown['baton_requests_total{outcome="failed"}'] == 0
    assert shown['baton_requests_rejected_total{reason="too_long"}'] == 0
    assert shown['baton_step_seconds_count{role="decode"}'] == 0


def test_counters_add_up() -> None:
    metrics = Metrics()
    metrics.count(catalog.HANDOFF_BYTES, amount=4096)
    metrics.count(catalog.REQUESTS, "finished")
    metrics.count(catalog.REQUESTS, "finished")
    shown = samples(metrics)
    assert shown["baton_handoff_bytes_total"] == 4096
    assert shown['baton_requests_total{outcome="finished"}'] == 2


def test_a_histogram_counts_a_bound_below_itself() -> None:
    """Buckets are `le`: a value on a bound is in its bucket; one above all bounds is in +Inf only."""
    metrics = Metrics()
    for value in (0.001, 0.0011, 99.0):
        metrics.observe(catalog.ITL, value)
    shown = samples(metrics)
    name = "baton_inter_token_latency_seconds"
    assert shown[f'{name}_bucket{{le="0.001"}}'] == 1
    assert shown[f'{name}_bucket{{le="0.0025"}}'] == 2
    assert shown[f'{name}_bucket{{le="5.0"}}'] == 2
    assert shown[f'{name}_bucket{{le="+Inf"}}'] == shown[f"{name}_count"] == 3
    assert shown[f"{name}_sum"] == pytest.approx(99.0021)


def test_gauges_show_the_views_and_forget_who_left() -> None:
    metrics = Metrics()
    worker = WorkerView(id=WorkerId("w0"), host=HostId("h0"), role="prefill", running_requests=2, waiting_requests=7)
    metrics.set_workers([worker])
    here, there = (
        HostView(id=HostId(name), blocks_total=9, blocks_free=4, blocks_used=3, blocks_cached=2)
        for name in ("h0", "h1")
    )
    metrics.set_blocks([("host", here), ("file", here), ("file", there)])
    shown = samples(metrics)
    assert shown['baton_requests_running{role="prefill",worker="w0"}'] == 2
    assert shown['baton_requests_waiting{role="prefill",worker="w0"}'] == 7
    blocks = {name: value for name, value in shown.items() if name.startswith("baton_kv_blocks")}
    assert blocks == {
        f'baton_kv_blocks{{host="{host}",state="{state}",tier="{tier}"}}': count
        for host, tier in (("h0", "host"), ("h0", "file"), ("h1", "file"))
        for state, count in (("free", 4), ("used", 3), ("cached", 2))
    }
    metrics.set_workers([])
    metrics.set_blocks([("host", there)])
    shown = samples(metrics)
    assert not any(name.startswith("baton_requests_running") for name in shown)
    assert {name for name in shown if name.startswith("baton_kv_blocks")} == {
        f'baton_kv_blocks{{host="h1",state="{state}",tier="host"}}' for state in ("free", "used", "cached")
    }, "tiers and hosts that are gone are not shown"


def test_nothing_is_shown_of_a_host_that_is_gone() -> None:
    metrics = Metrics()
    for name in ("h0", "h1"):
        metrics.count(catalog.TIER_BLOCKS, name, "file", "stored", amount=3)
        metrics.count(catalog.TIER_RESTS, name, "file")
    metrics.count(catalog.FAILOVERS)
    metrics.forget_host(HostId("h0"))
    shown = samples(metrics)
    assert not any("h0" in name for name in shown)
    assert shown['baton_tier_blocks_total{host="h1",outcome="stored",tier="file"}'] == 3
    assert shown["baton_failovers_total"] == 1


def test_a_label_that_the_catalog_does_not_know_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="outcome cannot be lost"):
        Metrics().count(catalog.REQUESTS, "lost")
    with pytest.raises(AssertionError, match="has 1 labels"):
        Metrics().count(catalog.REQUESTS)


def test_two_recorders_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.count(catalog.FAILOVERS)
    assert samples(other)["baton_failovers_total"] == 0
