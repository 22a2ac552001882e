"""Expose metrics under vLLM's names, so that dashboards, routers and scalers made for vLLM work with Baton."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from baton.decide.metrics import catalog
from baton.decide.metrics.catalog import Counter, Gauge, Histogram, Metric
from baton.serve.live.metrics_registry import Metrics, histogram_buckets

_HISTOGRAMS: dict[str, Histogram] = {
    "vllm:time_to_first_token_seconds": catalog.TTFT,
    "vllm:inter_token_latency_seconds": catalog.ITL,
    "vllm:request_time_per_output_token_seconds": catalog.TPOT,
    "vllm:e2e_request_latency_seconds": catalog.E2E,
    "vllm:request_queue_time_seconds": catalog.QUEUE,
    "vllm:request_prefill_time_seconds": catalog.PREFILL,
}
_COUNTERS: dict[str, Counter] = {
    "vllm:prompt_tokens": catalog.PREFIX_QUERY_TOKENS,
    "vllm:prompt_tokens_cached": catalog.PREFIX_HIT_TOKENS,
    "vllm:generation_tokens": catalog.GENERATED_TOKENS,
    "vllm:prefix_cache_queries": catalog.PREFIX_QUERY_TOKENS,
    "vllm:prefix_cache_hits": catalog.PREFIX_HIT_TOKENS,
    "vllm:num_preemptions": catalog.PREEMPTIONS,
}
_GAUGES: dict[str, Gauge] = {
    "vllm:num_requests_running": catalog.RUNNING,
    "vllm:num_requests_waiting": catalog.WAITING,
}
_LABELS = ("model_name", "engine")
_ENGINE = "0"
"""vLLM numbers its engines. A cluster of Baton is one."""


class VllmNames(Collector):
    """The metrics of every model by its name, as vLLM 0.32 calls them. Sums over the workers and hosts of a model.

    Source: vllm/v1/metrics/loggers.py. Buckets are those of Baton.
    """

    def __init__(self, models: Mapping[str, Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for name, metric in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, metric.help, labels=_LABELS)
            for model, metrics in self._models.items():
                for series in metrics.series(metric).values():
                    histogram.add_metric((model, _ENGINE), histogram_buckets(metric, series), series.sum)
            yield histogram
        for name, metric in _COUNTERS.items():
            counter = CounterMetricFamily(name, metric.help, labels=_LABELS)
            for model, metrics in self._models.items():
                counter.add_metric((model, _ENGINE), _total(metrics, metric))
            yield counter
        for name, metric in _GAUGES.items():
            gauge = GaugeMetricFamily(name, metric.help, labels=_LABELS)
            for model, metrics in self._models.items():
                gauge.add_metric((model, _ENGINE), _total(metrics, metric))
            yield gauge
        yield self._kv_usage()
        yield self._finished()

    def _kv_usage(self) -> GaugeMetricFamily:
        """Return the used part of the arenas. As in vLLM, cached blocks count as free."""
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used part of the KV cache, 0 to 1.", labels=_LABELS)
        for model, metrics in self._models.items():
            blocks = {"free": 0.0, "used": 0.0, "cached": 0.0}
            for (_, tier, state), series in metrics.series(catalog.KV_BLOCKS).items():
                if tier == catalog.ARENA_TIER:
                    blocks[state] += series.sum
            usage.add_metric((model, _ENGINE), blocks["used"] / (sum(blocks.values()) or 1.0))
        return usage

    def _finished(self) -> CounterMetricFamily:
        counter = CounterMetricFamily("vllm:request_success", "Closed requests.", labels=(*_LABELS, "finished_reason"))
        for model, metrics in self._models.items():
            reasons = {reason: series.sum for (reason,), series in metrics.series(catalog.FINISH_REASONS).items()}
            outcomes = {outcome: series.sum for (outcome,), series in metrics.series(catalog.REQUESTS).items()}
            reasons |= {"abort": outcomes["cancelled"], "error": outcomes["failed"]}
            for reason, requests in reasons.items():
                counter.add_metric((model, _ENGINE, reason), requests)
        return counter


def _total(metrics: Metrics, metric: Metric) -> float:
    return sum(series.sum for series in metrics.series(metric).values())
