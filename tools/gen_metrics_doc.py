"""Write docs/metrics.md from the catalog. With --check, only say whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from baton.decide.metrics.catalog import METRICS, Histogram, Metric

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
HEAD = """# Metrics

`GET /metrics` exposes these in the Prometheus text format. Generated from `src/baton/decide/metrics/catalog.py` by
`tools/gen_metrics_doc.py`; a test fails when the page is not current.

A series whose label values are all listed below is exposed from the start, at 0. `worker` and `host` are names of the
deployment; a worker that is lost disappears. Every histogram has the series `_bucket{le}`, `_sum` and `_count`.

| Metric | Type | Labels | Unit | Meaning |
|---|---|---|---|---|
"""


def page() -> str:
    rows = "".join(_row(metric) for metric in METRICS)
    buckets = "".join(
        f"- `{metric.name}`: {', '.join(f'{bound:g}' for bound in metric.buckets)}\n"
        for metric in METRICS
        if isinstance(metric, Histogram)
    )
    return f"{HEAD}{rows}\n## Buckets\n\nUpper bounds, in seconds.\n\n{buckets}"


def _row(metric: Metric) -> str:
    labels = "; ".join(
        f"`{label.name}`" + (f" ({', '.join(label.values)})" if label.values else "") for label in metric.labels
    )
    kind = type(metric).__name__.lower()
    return f"| `{metric.name}` | {kind} | {labels or '-'} | {metric.unit} | {metric.help} |\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        if not current:
            print(f"{PAGE.name} is not current: run python tools/gen_metrics_doc.py")
        return 0 if current else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
