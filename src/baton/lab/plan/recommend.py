"""Answer a plan's question: search for fleets, verify them by simulation, and explain the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import Struct

from baton.core.errors import ConfigError
from baton.lab.plan.admission import AdmissionResult, describe_admission, play_admissions
from baton.lab.plan.candidates import Candidate, CostPoint, cost_points, list_candidates
from baton.lab.plan.cluster import cluster_spec
from baton.lab.plan.demand import LengthClass
from baton.lab.plan.frontier import FrontierPoint, crossover, frontier
from baton.lab.plan.growth import LoadStep, day_steps, describe_day, describe_growth, growth_steps
from baton.lab.plan.impossible import explain_impossible
from baton.lab.plan.link import LinkAdvice, describe_link, link_advice
from baton.lab.plan.options import build_options, without_losses
from baton.lab.plan.planned_fleet import PlannedFleet
from baton.lab.plan.play import FleetResults, FleetSimulator, describe_results
from baton.lab.plan.published import describe_published
from baton.lab.plan.reasons import not_recommended, reasons
from baton.lab.plan.search import Search, Shape
from baton.lab.plan.spec import PlanInput, PlanSpec
from baton.lab.plan.tiers import TierAdvice, choose_tier, describe_tiers
from baton.lab.plan.tune import DRAWS, LOADS, TunedPolicy, judge, tune
from baton.lab.plan.verdict import verdict_lines
from baton.lab.plan.verify import VerifiedFleet, verify
from baton.lab.report.summary import Results

TUNING_SIMULATIONS_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A recommended fleet and the evidence for it."""

    question: PlanInput
    search: Search
    best: PlannedFleet
    verified: dict[Shape, VerifiedFleet]
    """Finalists with their simulation results. Empty if the plan asks for no finalists."""
    admissions: list[AdmissionResult]
    """Results of the simulated admission policies, the recommended one first. Empty without simulation."""
    tiers: list[TierAdvice]
    """Results with each tier and without one, best first. Empty if the plan names no tier."""
    points: list[FrontierPoint]
    cost_points: list[CostPoint]
    """Price of the best fleet of each shape against the request rate."""
    growth: list[LoadStep]
    """Fleets of the next purchases. Empty if the plan asks for no growth."""
    day: list[LoadStep]
    """Fleet of each hour. Empty if the plan gives no rates of the day."""
    links: list[LinkAdvice]
    candidates: list[Candidate]
    """Fleets that were compared, the recommended one first."""
    verdict: list[str]
    """The purchase, its price and headroom, and the reason against the next best fleet."""
    reasons: list[str]
    not_recommended: list[str]
    out: list[str]
    """Reasons why worker kinds were excluded."""
    tuned: TunedPolicy | None
    """Policies for the recommended fleet. None: the plan does not ask for them."""

    @property
    def played(self) -> FleetResults | None:
        """The simulation of the recommended fleet."""
        return next((each.played for each in self.verified.values() if each.fleet is self.best), None)

    @property
    def results(self) -> Results | None:
        """Results of the recommended fleet's simulation."""
        return self.played.results if self.played is not None else None

    @property
    def notes(self) -> list[str]:
        """Figures of the recommended fleet that were not measured on its hardware but taken from other hardware."""
        return sorted({note for group in self.best.groups for note in group.option.facts.notes})

    @property
    def short(self) -> bool:
        """The fleet serves less than the wanted rate, or missed the SLO in simulation."""
        demand, results = self.search.demand, self.results
        missed = results is not None and (results.slo.attainment_ratio or 0.0) < demand.attainment_ratio
        return missed or (demand.rate_rps is not None and self.best.rate_rps < demand.rate_rps * (1 - 1e-3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """Result of the screening, which takes a second or two. Simulations follow."""

    question: PlanInput
    search: Search
    best: PlannedFleet
    """The best fleet by the screening."""
    out: list[str]
    """Reasons why worker kinds were excluded."""


def screen(question: PlanInput) -> Screened:
    """Return the search with its best fleet. Raises ConfigError if no worker fits or no fleet meets the SLO."""
    spec = question.spec
    found, out = build_options(question.choices, question.stocks, spec.wire)
    if not found:
        raise ConfigError("\n".join(out))
    search = Search(
        demand=question.demand, options=found, objective=spec.objective, same_host=question.same_host,
        pool_penalty_ratio=spec.pool_penalty_ratio, spare_workers=spec.spare_workers, spare_hosts=spec.spare_hosts,
    )  # fmt: skip
    best = search.fleet(spec.shape)
    if best is not None:
        return Screened(question=question, search=search, best=best, out=out)
    unspared = replace(search, spare_workers=0, spare_hosts=0, options=without_losses(found), known_fleets={})
    if search.has_reserve and unspared.fleet(spec.shape):
        raise ConfigError(
            f"the GPUs suffice for {question.demand.rate_rps:g} req/s, but not after the loss of spare_workers, "
            "spare_hosts and lost_ratio: give more GPUs, or lower these"
        )
    raise ConfigError("\n".join(explain_impossible(search)))


def recommend(question: PlanInput) -> Recommendation:
    """Return the recommended fleet. Raises ConfigError if no worker fits the hardware or no fleet meets the SLO."""
    return recommend_screened(screen(question))


def recommend_screened(screened: Screened, tell: Callable[[str], None] = lambda _: None) -> Recommendation:
    """Return the recommended fleet after the screening: simulate the finalists, and explain the result.

    `tell` receives the progress of tuning.
    """
    question, spec, out = screened.question, screened.question.spec, screened.out
    search, tiers = choose_tier(screened.search, spec.shape, spec.tiers, question.requests)
    drawn = tuple(LengthClass(each.input_tokens, each.output_tokens, 1.0) for each in question.requests)
    simulator = FleetSimulator(
        search=search, requests=spec.requests, seed=spec.seed, promised=spec.admission[0] == "slo", drawn=drawn
    )
    verified = _finalists(search, spec, simulator)
    chosen = max(verified.values(), key=lambda each: each.worth(search)) if verified else _unplayed(search, spec.shape)
    best, believed = chosen.fleet, replace(search, derate=chosen.derate)
    candidates = list_candidates(believed, best, verified)
    points = frontier(search)
    prefills = {group.option.name: group.option for group in best.having("prefill")} or {
        best.groups[0].option.name: best.groups[0].option
    }
    links = [link_advice(option, question.demand, same_host=question.same_host) for option in prefills.values()]
    tokens = round(question.demand.input_tokens)
    admissions = play_admissions(simulator, chosen, spec.admission if spec.finalists else ())
    growth = growth_steps(believed, best, spec.workload.growth_ratio)
    day = day_steps(believed, best, spec.workload.day_rates_rps)
    tuned, tuning = _tuned(simulator, best, tell) if spec.tune else (None, [])
    return Recommendation(
        question=question,
        search=search,
        best=best,
        verified=verified,
        admissions=admissions,
        tiers=tiers,
        points=points,
        cost_points=cost_points(believed, best, verified),
        growth=growth,
        day=day,
        links=links,
        verdict=verdict_lines(search, best, chosen.played, candidates),
        reasons=[
            *_crossover_texts(points),
            *reasons(best, question.demand),
            *describe_growth(search, growth, spec.workload.growth_ratio),
            *describe_day(search, day),
            *([describe_results(best, chosen.played, search.demand)] if chosen.played is not None else []),
            *describe_tiers(tiers),
            *describe_admission(admissions),
            *tuning,
            *(describe_link(link, tokens=tokens) for link in links),
            *dict.fromkeys(line for group in best.groups for line in describe_published(group, spec.engine)),
        ],
        candidates=[candidate for candidate, _ in candidates],
        not_recommended=not_recommended(believed, candidates),
        out=out,
        tuned=tuned,
    )


def _tuned(
    simulator: FleetSimulator, fleet: PlannedFleet, tell: Callable[[str], None]
) -> tuple[TunedPolicy, list[str]]:
    """Return policies for a fleet, and their results with other arrivals than those that they were chosen by."""
    search, fleet = simulator.search, fleet.without_spares()
    spec, slo = cluster_spec(fleet, same_host=search.same_host), search.demand.slo
    choosing = simulator.draws(fleet, loads=LOADS, count=DRAWS, seed=simulator.seed)
    judging = simulator.draws(fleet, loads=LOADS, count=DRAWS, seed=simulator.seed + DRAWS)
    found = tune(spec, choosing, slo, simulations_max=TUNING_SIMULATIONS_MAX, tell=tell)
    return found, [f"policies: {found.name}", *judge(spec, judging, slo, found)]


def _finalists(search: Search, spec: PlanSpec, simulator: FleetSimulator) -> dict[Shape, VerifiedFleet]:
    """Return the verified fleet of each shape. The most promising shape is verified first.

    Once a fleet meets the SLO, only better fleets of the other shapes are simulated.
    """
    shapes: tuple[Shape, ...] = ("disaggregated", "mixed") if spec.shape == "best" else (spec.shape,)
    if spec.finalists > len(shapes):
        shapes = (*shapes, "best")
    promising: dict[Shape, PlannedFleet] = {
        shape: fleet for shape in shapes if (fleet := search.fleet(shape)) is not None
    }
    verified: dict[Shape, VerifiedFleet] = {}
    ranked = sorted(promising, key=lambda shape: search.worth(promising[shape]), reverse=True)
    for shape in ranked[: spec.finalists]:
        held = [search.worth(each.fleet) for each in verified.values() if each.holds]
        found = verify(search, shape, simulator, beat=max(held, default=None))
        if found is not None:
            verified[shape] = found
    return verified


def _unplayed(search: Search, shape: Shape) -> VerifiedFleet:
    fleet = search.fleet(shape)
    assert fleet is not None
    return VerifiedFleet(fleet=fleet, derate=search.derate, played=None, holds=False)


def _crossover_texts(points: list[FrontierPoint]) -> list[str]:
    at = crossover(points)
    if at is None:
        return []
    return [f"per GPU, separate workers give more above about {at:.0f} tokens/s for each user; below, mixed ones do"]


class PlanReport(Struct, frozen=True, kw_only=True):
    """The recommendation as JSON."""

    fleet: str
    groups: list[dict[str, str | int | float]]
    rate_rps: float
    """Planned rate: the asked one if the fleet carries it."""
    capacity_rps: float
    """Largest rate within the SLO, by the screening."""
    gpus: int
    usd_per_hour: float
    power_w: float
    objective: str
    value: float
    simulated: Results | None
    attainment_ratios: list[float]
    """SLO attainment of each sequence of arrivals, which shows the spread."""
    admissions: list[AdmissionResult]
    tiers: list[TierAdvice]
    candidates: list[Candidate]
    """Fleets that were compared, the recommended one first."""
    verdict: list[str]
    """The purchase, its price and headroom, and the reason against the next best fleet."""
    reasons: list[str]
    not_recommended: list[str]
    out: list[str]
    """Reasons why worker kinds were excluded."""
    links: list[LinkAdvice]
    crossover_tokens_per_s: float | None
    frontier: list[FrontierPoint]
    cost_points: list[CostPoint]
    """Price of the best fleet of each shape against the request rate."""
    growth: list[LoadStep]
    """Fleets of the next purchases. Empty if the plan asks for no growth."""
    day: list[LoadStep]
    """Fleet of each hour. Empty if the plan gives no rates of the day."""
    notes: list[str]


def make_report(found: Recommendation) -> PlanReport:
    """Return a recommendation in its JSON form."""
    best, objective = found.best, found.search.objective
    groups: list[dict[str, str | int | float]] = [
        {
            "role": group.role, "option": group.option.name, "hardware": group.option.stock.hardware.name,
            "workers": group.workers, "spare_workers": group.spare_workers, "gpus": group.option.facts.gpus,
            "tp": group.option.cost.parallel.tp, "pp": group.option.cost.parallel.pp,
            "cp": group.option.cost.parallel.cp,
            "weights": group.option.cost.precision.weights, "kv": group.option.cost.precision.kv,
            "rate_rps": group.capacity.rate_rps, "step_tokens_max": group.capacity.step_tokens_max,
            "requests": group.capacity.requests, "ttft_s": group.capacity.ttft_s, "tpot_s": group.capacity.tpot_s,
            "kv_tokens_max": group.option.facts.kv_tokens_max, "limit": group.capacity.limit,
        }
        for group in best.groups
    ]  # fmt: skip
    return PlanReport(
        fleet=best.name, groups=groups, rate_rps=best.rate_rps, capacity_rps=best.capacity_rps,
        gpus=best.gpus, usd_per_hour=best.usd_per_hour,
        power_w=best.power_w, objective=objective, value=best.value(objective), simulated=found.results,
        attainment_ratios=list(found.played.ratios) if found.played is not None else [],
        admissions=found.admissions, tiers=found.tiers, candidates=found.candidates,
        verdict=found.verdict, reasons=found.reasons, not_recommended=found.not_recommended, out=found.out,
        links=found.links, crossover_tokens_per_s=crossover(found.points), frontier=found.points,
        cost_points=found.cost_points, growth=found.growth, day=found.day, notes=found.notes,
    )  # fmt: skip
