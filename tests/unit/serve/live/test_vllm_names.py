"""What a dashboard for vLLM finds in the metrics of a server."""

from __future__ import annotations

from baton.core.types import HostId, HostView, WorkerId, WorkerView
from baton.decide.metrics import catalog
from baton.serve.live.metrics_registry import Metrics, render
from baton.serve.live.vllm_names import VllmNames

ENGINE = 'engine="0",model_name="m"'


def exposed(metrics: Metrics) -> dict[str, float]:
    lines = render(Metrics(), {"m": metrics}, VllmNames({"m": metrics})).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if "vllm:" in name[:5]}


def test_values_are_sums_over_workers_and_hosts() -> None:
    metrics = Metrics()
    metrics.set_workers(
        WorkerView(id=WorkerId(name), host=HostId("h"), role="mixed", running_requests=2, waiting_requests=3)
        for name in ("a", "b")
    )
    used = HostView(id=HostId("h"), blocks_total=8, blocks_free=2, blocks_used=2, blocks_cached=4)
    metrics.set_blocks([("host", used), ("file", used)])
    metrics.count(catalog.PREFIX_QUERY_TOKENS, amount=10)
    metrics.count(catalog.PREFIX_HIT_TOKENS, amount=4)
    metrics.count(catalog.GENERATED_TOKENS, amount=7)
    for reason in ("stop", "length", "length"):
        metrics.count(catalog.FINISH_REASONS, reason)
    metrics.count(catalog.REQUESTS, "cancelled")
    metrics.observe(catalog.TTFT, 0.3)
    shown = exposed(metrics)
    assert shown[f"vllm:num_requests_running{{{ENGINE}}}"] == 4
    assert shown[f"vllm:num_requests_waiting{{{ENGINE}}}"] == 6
    assert shown[f"vllm:kv_cache_usage_perc{{{ENGINE}}}"] == 0.25
    assert shown[f"vllm:prompt_tokens_total{{{ENGINE}}}"] == shown[f"vllm:prefix_cache_queries_total{{{ENGINE}}}"] == 10
    assert shown[f"vllm:prompt_tokens_cached_total{{{ENGINE}}}"] == 4
    assert shown[f"vllm:prefix_cache_hits_total{{{ENGINE}}}"] == 4
    assert shown[f"vllm:generation_tokens_total{{{ENGINE}}}"] == 7
    reasons = {
        reason: shown[f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}}']
        for reason in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 1, "length": 2, "abort": 1, "error": 0}
    assert shown[f"vllm:time_to_first_token_seconds_count{{{ENGINE}}}"] == 1
    assert shown['vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="m"}'] == 0
    assert shown['vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="m"}'] == 1


def test_a_model_without_blocks_uses_none() -> None:
    assert exposed(Metrics())[f"vllm:kv_cache_usage_perc{{{ENGINE}}}"] == 0
