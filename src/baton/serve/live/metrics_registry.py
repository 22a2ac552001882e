"""Store the values of the catalog's metrics and render them for Prometheus. There is no process-wide state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from baton.core.types import HostId, HostView, WorkerView
from baton.decide.metrics.catalog import (
    ARENA_TIER,
    EDGE_METRICS,
    HOST,
    KV_BLOCKS,
    KV_USAGE,
    METRICS,
    MODEL,
    RUNNING,
    STEP_ERROR,
    TENANT,
    WAITING,
    Counter,
    Gauge,
    Histogram,
    Metric,
)

Labels = tuple[str, ...]
"""Label values of a series, in the order of the metric's labels."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of `render`."""


class Metrics:
    """The metrics of a model, or of the HTTP edge.

    Only the event loop's thread may use them, because nothing is locked. A wrong number of labels, or a label value
    that the catalog does not list, fails an assertion.
    """

    def __init__(self) -> None:
        self._families = {metric.name: _Family(metric) for metric in METRICS}

    def observe(self, metric: Histogram, value: float, *labels: str) -> None:
        """Add a value, in the metric's unit, to a histogram. `labels`: values in the order of the metric's labels."""
        family = self._families[metric.name]
        series = family.series.get(labels) or family.add(labels)
        series.counts[bisect_left(metric.buckets, value)] += 1
        series.sum += value

    def count(self, metric: Counter, *labels: str, amount: float = 1) -> None:
        """Increase a counter by `amount`, which is at least 0."""
        assert amount >= 0, f"{metric.name} only grows, was given {amount}"
        family = self._families[metric.name]
        (family.series.get(labels) or family.add(labels)).sum += amount

    def set_workers(self, views: Iterable[WorkerView]) -> None:
        """Set the gauges of these workers, and remove those of all other workers."""
        running, waiting, error = (self._families[gauge.name] for gauge in (RUNNING, WAITING, STEP_ERROR))
        for family in (running, waiting, error):
            family.series.clear()
        for view in views:
            running.add((view.id, view.role)).sum = view.running_requests
            waiting.add((view.id, view.role)).sum = view.waiting_requests
            if view.prices is not None:
                error.add((view.id, view.role)).sum = view.prices.error_ratio

    def set_blocks(self, views: Iterable[tuple[str, HostView]]) -> None:
        """Set the gauges of KV blocks: pairs of a tier's name and a host's view. Remove those of other tiers."""
        blocks, usage = self._families[KV_BLOCKS.name], self._families[KV_USAGE.name]
        blocks.series.clear()
        usage.series.clear()
        for tier, view in views:
            blocks.add((view.id, tier, "free")).sum = view.blocks_free
            blocks.add((view.id, tier, "used")).sum = view.blocks_used
            blocks.add((view.id, tier, "cached")).sum = view.blocks_cached
            if tier == ARENA_TIER:
                usage.add((view.id,)).sum = view.blocks_used / max(1, view.blocks_total)

    def forget_host(self, host: HostId) -> None:
        """Remove the series of a lost host, because hosts that join under new names would grow the metrics forever."""
        for family in self._families.values():
            places = [place for place, label in enumerate(family.metric.labels) if label is HOST]
            for labels in [labels for labels in family.series if any(labels[place] == host for place in places)]:
                del family.series[labels]

    def series(self, metric: Metric) -> Mapping[Labels, Series]:
        """Return the series of a metric by the values of their labels."""
        return self._families[metric.name].series


def render(edge: Metrics, models: Mapping[str, Metrics], *others: Collector, with_tenants: bool = True) -> bytes:
    """Return the exposition text, of type `CONTENT_TYPE`, of the HTTP edge and of every model by its name.

    With several models, each series of a model has the label `model`. `others`: exposed after them.
    `with_tenants`: also the metrics by tenant.
    """
    registry = CollectorRegistry()
    for collector in (_Exposition(edge, models, with_tenants=with_tenants), *others):
        registry.register(collector)
    return generate_latest(registry)


@dataclass(slots=True)
class Series:
    """A metric with one set of label values."""

    counts: list[int]
    """Histogram: number of values in each bucket, not cumulative. The last bucket has no upper bound."""
    sum: float = 0.0
    """Histogram: the sum of all values. Counter or gauge: the value."""


class _Family:
    """The series of a metric. Series whose label values are known in advance exist from the start."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.series: dict[Labels, Series] = {}
        if isinstance(metric, Gauge):
            return
        if all(label.values for label in metric.labels):
            for labels in product(*(label.values for label in metric.labels)):
                self.add(labels)

    def add(self, labels: Labels) -> Series:
        metric = self.metric
        assert len(labels) == len(metric.labels), f"{metric.name} has {len(metric.labels)} labels, was given {labels}"
        for label, value in zip(metric.labels, labels, strict=True):
            assert not label.values or value in label.values, f"{metric.name}: {label.name} cannot be {value}"
        buckets = len(metric.buckets) + 1 if isinstance(metric, Histogram) else 0
        series = self.series[labels] = Series([0] * buckets)
        return series


class _Exposition(Collector):
    """Exposes the metrics to prometheus_client.

    That library's Counter and Histogram are not used. They add `_created` series, which the metrics contract does not
    have and which can be disabled only process-wide. They also lock for each value, so for each output token.
    """

    def __init__(self, edge: Metrics, models: Mapping[str, Metrics], *, with_tenants: bool) -> None:
        self._edge = edge
        self._models = models
        self._shown = [metric for metric in METRICS if with_tenants or TENANT not in metric.labels]

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for metric in self._shown:
            names = [label.name for label in metric.labels]
            if metric in EDGE_METRICS:
                yield _exposed(metric, names, self._edge.series(metric))
            elif len(self._models) == 1:
                yield _exposed(metric, names, next(iter(self._models.values())).series(metric))
            else:
                series = {
                    (*labels, model): one
                    for model, metrics in self._models.items()
                    for labels, one in metrics.series(metric).items()
                }
                yield _exposed(metric, [*names, MODEL.name], series)


def _exposed(
    metric: Metric, names: Sequence[str], series: Mapping[Labels, Series]
) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    match metric:
        case Histogram():
            exposed = HistogramMetricFamily(metric.name, metric.help, labels=names)
            for labels, one in series.items():
                exposed.add_metric(labels, histogram_buckets(metric, one), one.sum)
        case Counter() | Gauge():
            kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
            exposed = kind(metric.name, metric.help, labels=names)
            for labels, one in series.items():
                exposed.add_metric(labels, one.sum)
    return exposed


def histogram_buckets(metric: Histogram, series: Series) -> list[tuple[str, int]]:
    """Return the upper bounds of a histogram's buckets with the number of values up to each."""
    bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
    return list(zip(bounds, accumulate(series.counts), strict=True))
