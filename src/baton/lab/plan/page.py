"""HTML page of a plan: the fleet, the reasons for it, and the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from baton.core.types import Role
from baton.lab.plan.files import group_lines
from baton.lab.plan.frontier import FrontierPoint, crossover, pareto_points
from baton.lab.plan.planned_fleet import PRICE_UNIT, PlannedFleet, gpus_text
from baton.lab.plan.recommend import Recommendation
from baton.lab.report import svg
from baton.lab.report.page import notes, page, plot, plots, section, table, tiles

ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
BOX, GAP, ROW = 280, 60, 66
"""Width of a pool, gap between two pools, and height of a row of pools in the diagram, in pixels."""
GROUP_HEAD = ("role", "workers", "each", "GPUs", "req/s each", "requests at once", "tokens a step", "limit")


def plan_page(found: Recommendation) -> str:
    """Return the page as one HTML file without scripts or links."""
    best, demand = found.best, found.search.demand
    facts = [
        (f"req/s within the SLO ({demand.attainment_ratio:.0%})", f"{best.rate_rps:.2f}"),
        ("GPUs", str(best.gpus)),
        ("USD per hour", f"{best.usd_per_hour:.2f}" if best.usd_per_hour else "unknown"),
        ("kW, rated", f"{best.power_w / 1e3:.1f}"),
    ]
    if found.results is not None and found.results.slo.attainment_ratio is not None:
        facts.append(("met the SLO in simulation", f"{found.results.slo.attainment_ratio:.1%}"))
    model = found.search.options[0].cost.model.name
    slo = (
        f"TTFT {demand.slo.ttft_s:g} s, TPOT {demand.slo.tpot_s:g} s for {demand.attainment_ratio:.0%} of the requests"
    )
    return page(
        f"A plan for {model}",
        f"{slo}; prompts of {demand.input_tokens:.0f} and answers of {demand.output_tokens:.0f} tokens on average",
        [
            tiles(facts),
            section("Fleet", plots([fleet_diagram(best)])),
            section("Workers", table(GROUP_HEAD, [row[: len(GROUP_HEAD)] for row in group_lines(found)])),
            section("Why", notes(found.reasons)),
            section("Speed against throughput", plots([frontier_plot(found.points)])),
            *([section("Cost against rate", plots([cost_plot(found)]))] if found.cost_points else []),
            section("Not recommended", notes([*found.not_recommended, *found.out])),
        ],
    )


def fleet_diagram(best: PlannedFleet) -> str:
    """Return the diagram of the fleet: the pools that a request passes, with an arrow where its KV is handed off."""
    columns = [groups for role in ROLES if (groups := best.having(role))]
    height = 20 + ROW * max(len(groups) for groups in columns)
    parts: list[str] = []
    for place, groups in enumerate(columns):
        left = 10 + place * (BOX + GAP)
        for row, group in enumerate(groups):
            top, spare = 10 + row * ROW, f", {group.spare_workers} of them spare" if group.spare_workers else ""
            lines = (
                f"{group.workers} x {group.role}{spare}", group.option.name,
                f"{gpus_text(group.workers * group.option.facts.gpus)}, {group.rate_rps:.2f} req/s",
            )  # fmt: skip
            parts.append(svg.rectangle((left, left + BOX, top, ROW - 10), group.role, opacity=0.25))
            parts += [
                f'<text x="{left + 8}" y="{top + svg.LINE * (1 + line)}">{escape(text)}</text>'
                for line, text in enumerate(lines)
            ]
        group_before = columns[place - 1] if place else []
        if group_before:
            word = "KV \u2192" if group_before[0].role == "prefill" and groups[0].role == "decode" else "or"
            parts.append(f'<text x="{left - GAP / 2}" y="{height / 2}" text-anchor="middle">{word}</text>')
    width = 20 + len(columns) * (BOX + GAP) - GAP
    drawn = f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" aria-label="fleet">'
    return plot("The pools that a request passes", f"{drawn}{''.join(parts)}</svg>", wide=True)


def frontier_plot(points: Sequence[FrontierPoint]) -> str:
    """Return the plot of tokens/s per GPU over tokens/s per user. Dots mark points that no other point beats."""
    if not points:
        return ""
    frame = svg.Frame(
        x_max=1.05 * max(point.user_tokens_per_s for point in points),
        y_max=1.1 * max(point.gpu_tokens_per_s for point in points),
    )
    parts = [frame.axes("tokens/s for each user", "tokens/s per GPU")]
    for shape, kind in (("disaggregated", "a"), ("mixed", "c")):
        curve = sorted((point.user_tokens_per_s, point.gpu_tokens_per_s) for point in points if point.shape == shape)
        if curve:
            parts.append(svg.polyline(frame, [x for x, _ in curve], [y for _, y in curve], kind))
    for point in pareto_points(points):
        x, y = frame.x(point.user_tokens_per_s), frame.y(point.gpu_tokens_per_s)
        kind = "a" if point.shape == "disaggregated" else "c"
        parts.append(f'<circle class="area {kind}" style="fill-opacity:1" cx="{x}" cy="{y}" r="3.5">'
                     f"<title>{escape(point.fleet)}</title></circle>")  # fmt: skip
    at = crossover(points)
    if at is not None:
        parts.append(svg.vertical(frame, at, "separate workers pay"))
    key = '<p class="key"><i class="a">separate prefill and decode</i> · <i class="c">mixed</i> · dots: not beaten</p>'
    drawn = svg.svg(frame, "".join(parts), "tokens per second and GPU over tokens per second and user")
    return f'<div class="plot wide"><h3>For every TPOT target, the best fleet of each shape</h3>{drawn}{key}</div>'


def cost_plot(found: Recommendation) -> str:
    """Return the plot of the fleet's price over the request rate. The dot marks the recommended fleet."""
    points, best, objective = found.cost_points, found.best, found.search.objective
    frame = svg.Frame(
        x_max=1.05 * max(point.rate_rps for point in points), y_max=1.1 * max(point.price for point in points)
    )
    parts = [frame.axes("requests/s", PRICE_UNIT[objective])]
    for shape, kind in (("disaggregated", "a"), ("mixed", "c")):
        curve = [(point.rate_rps, point.price) for point in points if point.shape == shape]
        if curve:
            parts.append(svg.polyline(frame, [x for x, _ in curve], [y for _, y in curve], kind))
    x, y = frame.x(best.rate_rps), frame.y(best.price(objective))
    kind = "a" if best.having("prefill") else "c"
    parts.append(f'<circle class="area {kind}" style="fill-opacity:1" cx="{x}" cy="{y}" r="3.5">'
                 f"<title>{escape(best.name)}</title></circle>")  # fmt: skip
    key = '<p class="key"><i class="a">separate prefill and decode</i> · <i class="c">mixed</i> · dot: recommended</p>'
    drawn = svg.svg(frame, "".join(parts), f"{PRICE_UNIT[objective]} over requests per second")
    return f'<div class="plot wide"><h3>For every rate, the cheapest fleet of each shape</h3>{drawn}{key}</div>'
