"""HTML page of a plan: the fleet, the reasons for it, and the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from baton.core.types import Role
from baton.lab.plan.files import group_lines
from baton.lab.plan.frontier import FrontierPoint, crossover, pareto_points
from baton.lab.plan.planned_fleet import PRICE_UNIT, PlannedFleet, gpus_text
from baton.lab.plan.recommend import Recommendation
from baton.lab.report.drawings import Color, Curves, Mark, Series
from baton.lab.report.page import card, notes, page, plot, plots, section, table, tiles

ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
GROUP_HEAD = ("role", "workers", "each", "GPUs", "req/s each", "requests at once", "tokens a step", "limit")

SHAPES: dict[str, tuple[str, Color]] = {
    "disaggregated": ("separate prefill and decode", "--decode"),
    "mixed": ("mixed", "--mixed"),
}
"""Label and colour of each shape of a fleet."""


def plan_page(found: Recommendation) -> str:
    """Return the page as one HTML file, which loads nothing."""
    best, demand = found.best, found.search.demand
    facts = [
        (f"req/s within the SLO ({demand.attainment_ratio:.0%})", f"{best.rate_rps:.2f}"),
        ("GPU" if best.gpus == 1 else "GPUs", str(best.gpus)),
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
            section("Verdict", notes(found.verdict)),
            section("Fleet", plots([fleet_diagram(best)])),
            section("Workers", table(GROUP_HEAD, [row[: len(GROUP_HEAD)] for row in group_lines(found)])),
            section("Why", notes(found.reasons)),
            section("Speed against throughput", plots([frontier_plot(found.points)])),
            section("Cost against rate", plots([cost_plot(found)])),
            section("Not recommended", notes([*found.not_recommended, *found.out])),
        ],
    )


def fleet_diagram(best: PlannedFleet) -> str:
    """Return the diagram of the fleet: the pools that a request passes, with an arrow where its KV is handed off."""
    columns = [groups for role in ROLES if (groups := best.having(role))]
    parts: list[str] = []
    for place, groups in enumerate(columns):
        if place:
            is_handoff = columns[place - 1][0].role == "prefill" and groups[0].role == "decode"
            parts.append(f"<span>{'KV →' if is_handoff else 'or'}</span>")
        pools: list[str] = []
        for group in groups:
            spare = f", {group.spare_workers} of them spare" if group.spare_workers else ""
            lines = (
                f"{group.workers} x {group.role}{spare}", group.option.name,
                f"{gpus_text(group.workers * group.option.facts.gpus)}, {group.rate_rps:.2f} req/s",
            )  # fmt: skip
            pools.append(f'<p class="pool {group.role}">{"<br>".join(map(escape, lines))}</p>')
        parts.append(f"<div>{''.join(pools)}</div>")
    return card("The pools that a request passes", f'<div class="fleet">{"".join(parts)}</div>', wide=True)


def frontier_plot(points: Sequence[FrontierPoint]) -> str:
    """Return the plot of tokens/s per GPU over tokens/s per user. Dots mark points that no other point beats."""
    if not points:
        return ""
    series: list[Series] = []
    for shape, (label, color) in SHAPES.items():
        curve = sorted((point.user_tokens_per_s, point.gpu_tokens_per_s) for point in points if point.shape == shape)
        series += _curve(label, color, curve)
    for shape, (label, color) in SHAPES.items():
        best = sorted(
            (point.user_tokens_per_s, point.gpu_tokens_per_s, point.fleet)
            for point in pareto_points(points)
            if point.shape == shape
        )
        series += _dots(f"{label}, not beaten", color, best)
    at = crossover(points)
    drawing = Curves(
        series=series,
        format="number",
        label="tokens/s per GPU",
        x_max=1.05 * max(point.user_tokens_per_s for point in points),
        x_label="tokens/s for each user",
        marks=[] if at is None else [Mark(at, "separate workers pay")],
    )
    return plot("For every TPOT target, the best fleet of each shape", drawing, wide=True)


def cost_plot(found: Recommendation) -> str:
    """Return the plot of the fleet's price over the request rate. The dot marks the recommended fleet."""
    points, best, objective = found.cost_points, found.best, found.search.objective
    series: list[Series] = []
    for shape, (label, color) in SHAPES.items():
        curve = sorted((point.rate_rps, point.price) for point in points if point.shape == shape)
        series += _curve(label, color, curve)
    color = SHAPES["disaggregated" if best.having("prefill") else "mixed"][1]
    series += _dots("recommended", color, [(best.rate_rps, best.price(objective), best.name)])
    drawing = Curves(
        series=series,
        format="number",
        label=PRICE_UNIT[objective],
        x_max=1.05 * max(best.rate_rps, *(point.rate_rps for point in points)),
        x_label="requests/s",
    )
    return plot("For every rate, the cheapest fleet of each shape", drawing, wide=True)


def _curve(label: str, color: Color, points: Sequence[tuple[float, float]]) -> list[Series]:
    """Return a curve through points in ascending order. Empty without points."""
    return [Series(label=label, color=color, x=[x for x, _ in points], values=[y for _, y in points])] if points else []


def _dots(label: str, color: Color, points: Sequence[tuple[float, float, str]]) -> list[Series]:
    """Return dots with names. Empty without points."""
    if not points:
        return []
    x, values, names = zip(*points, strict=True)
    return [Series(label=label, color=color, x=x, values=values, is_dots=True, names=names)]
