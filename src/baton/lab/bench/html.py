"""A run as one HTML file: see `baton.lab.report`."""

from __future__ import annotations

from baton.lab.bench.run import BenchReport
from baton.lab.bench.table import facts, remarks
from baton.lab.report.run_page import RunPage, render_run


def render_html(report: BenchReport) -> str:
    """The whole page."""
    return render_run(
        RunPage(
            title=f"baton bench: {report.target.model}",
            subtitle=report.options.url,
            facts=list(facts(report)),
            remarks=list(remarks(report)),
            results=report.results,
            records=[reply.record for reply in report.replies],
            slo=report.options.slo,
            timeline=report.timeline,
        )
    )
