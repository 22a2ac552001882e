"""Write the table of metrics in docs/api.md from the catalog (`--check`: only compare)."""

from __future__ import annotations

import sys

from docgen import cell, publish_block, table

from baton.decide.metrics.catalog import METRICS, Histogram, Metric


def _row(metric: Metric) -> list[str]:
    labels = "; ".join(
        f"`{label.name}`" + (f" ({', '.join(label.values)})" if label.values else "") for label in metric.labels
    )
    kind = type(metric).__name__.lower()
    return [f"`{metric.name}`", kind, labels, metric.unit, cell(metric.help)]


def _buckets() -> str:
    """Return the range of the buckets' upper bounds; histograms with the same bounds share a line."""
    names: dict[tuple[float, ...], list[str]] = {}
    for metric in METRICS:
        if isinstance(metric, Histogram):
            names.setdefault(tuple(metric.buckets), []).append(f"`{metric.name}`")
    return "\n".join(
        f"- {', '.join(names)}: {len(bounds)} from {min(bounds):g} to {max(bounds):g}"
        for bounds, names in names.items()
    )


def render() -> str:
    rows = table(["Metric", "Type", "Labels", "Unit", "Meaning"], [_row(metric) for metric in METRICS])
    return f"{rows}\n\nUpper bounds of the buckets (`/metrics` lists them):\n\n{_buckets()}"


if __name__ == "__main__":
    sys.exit(publish_block("docs/api.md", "gen_metrics_doc.py", render, sys.argv[1:]))
