"""Record the catalog's metrics and expose them. One recorder per server; no process-wide state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from baton.core.types import HostId, HostView, WorkerView
from baton.decide.metrics.catalog import HOST, KV_BLOCKS, METRICS, RUNNING, WAITING, Counter, Gauge, Histogram, Metric

Labels = tuple[str, ...]
"""Values in the order of the metric's labels."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `render` returns."""


class Metrics:
    """Records what the doing half measured. Times come in as arguments.

    Used from one thread: an event loop records and renders between awaits, so nothing is locked.
    A wrong number of labels, or a value that the catalog does not know, is our bug and asserted.
    """

    def __init__(self) -> None:
        self._families = {metric.name: _Family(metric) for metric in METRICS}
        self._registry = CollectorRegistry()
        self._registry.register(_Exposition(self._families))

    def observe(self, metric: Histogram, value: float, *labels: str) -> None:
        """Add one value, in the metric's unit. `labels` in the metric's order."""
        family = self._families[metric.name]
        series = family.series.get(labels) or family.add(labels)
        series.counts[bisect_left(metric.buckets, value)] += 1
        series.sum += value

    def count(self, metric: Counter, *labels: str, amount: float = 1) -> None:
        """Add `amount`, at least 0."""
        assert amount >= 0, f"{metric.name} only grows, was given {amount}"
        family = self._families[metric.name]
        (family.series.get(labels) or family.add(labels)).sum += amount

    def set_workers(self, views: Iterable[WorkerView]) -> None:
        """Show exactly these workers' loads; a worker that is not among them is no longer exposed."""
        running, waiting = self._families[RUNNING.name], self._families[WAITING.name]
        running.series.clear()
        waiting.series.clear()
        for view in views:
            running.add((view.id, view.role)).sum = view.running_requests
            waiting.add((view.id, view.role)).sum = view.waiting_requests

    def set_blocks(self, views: Iterable[tuple[str, HostView]]) -> None:
        """Show exactly these KV blocks: each a tier, and what a host has there."""
        blocks = self._families[KV_BLOCKS.name]
        blocks.series.clear()
        for tier, view in views:
            blocks.add((view.id, tier, "free")).sum = view.blocks_free
            blocks.add((view.id, tier, "used")).sum = view.blocks_used
            blocks.add((view.id, tier, "cached")).sum = view.blocks_cached

    def forget_host(self, host: HostId) -> None:
        """Show nothing of a host that is gone: hosts come and go under ever new names while the server lives."""
        for family in self._families.values():
            places = [place for place, label in enumerate(family.metric.labels) if label is HOST]
            for labels in [labels for labels in family.series if any(labels[place] == host for place in places)]:
                del family.series[labels]

    def render(self) -> bytes:
        """The text that Prometheus scrapes; its type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)


@dataclass(slots=True)
class _Series:
    """One metric under one choice of labels."""

    counts: list[int]
    """Of a histogram: values per bucket, not cumulated; the last has no bound."""
    sum: float = 0.0
    """Of a histogram the sum of its values; else the value."""


class _Family:
    """All series of one metric. Those whose labels are known beforehand exist from the start."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.series: dict[Labels, _Series] = {}
        if isinstance(metric, Gauge):
            return
        if all(label.values for label in metric.labels):
            for labels in product(*(label.values for label in metric.labels)):
                self.add(labels)

    def add(self, labels: Labels) -> _Series:
        metric = self.metric
        assert len(labels) == len(metric.labels), f"{metric.name} has {len(metric.labels)} labels, was given {labels}"
        for label, value in zip(metric.labels, labels, strict=True):
            assert not label.values or value in label.values, f"{metric.name}: {label.name} cannot be {value}"
        buckets = len(metric.buckets) + 1 if isinstance(metric, Histogram) else 0
        series = self.series[labels] = _Series([0] * buckets)
        return series


class _Exposition(Collector):
    """Shows the recorder to prometheus_client.

    Its own Counter and Histogram are not used: they add `_created` series that the contract does not have unless a
    switch of the whole process is thrown, and lock at each value (one per output token).
    """

    def __init__(self, families: dict[str, _Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for family in self._families.values():
            metric = family.metric
            names = [label.name for label in metric.labels]
            match metric:
                case Histogram():
                    yield _histogram(metric, names, family.series)
                case Counter():
                    counter = CounterMetricFamily(metric.name, metric.help, labels=names)
                    for labels, one in family.series.items():
                        counter.add_metric(labels, one.sum)
                    yield counter
                case Gauge():
                    gauge = GaugeMetricFamily(metric.name, metric.help, labels=names)
                    for labels, one in family.series.items():
                        gauge.add_metric(labels, one.sum)
                    yield gauge


def _histogram(metric: Histogram, names: list[str], series: dict[Labels, _Series]) -> HistogramMetricFamily:
    exposed = HistogramMetricFamily(metric.name, metric.help, labels=names)
    bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
    for labels, one in series.items():
        exposed.add_metric(labels, list(zip(bounds, accumulate(one.counts), strict=True)), one.sum)
    return exposed
