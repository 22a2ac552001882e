"""Choose the policies of one fleet by simulation: the default set, perhaps with other options, or a published set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec
from msgspec.structs import asdict, replace

from baton.core.config import Plugin, PolicyChoice, PolicyConfig
from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.decide.policy.policy_sets import resolve
from baton.lab.report.summary import SloTargets
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.schedule import mean_rate_rps, scale_rate

LOADS = (0.9, 1.2)
"""Shares of the wanted rate at which policies are compared."""
DRAWS, DRAW_REQUESTS_MIN = 3, 20
"""Parts of each half of a trace, and the least requests of one."""
MARGIN_RATIO = 0.01
"""The default set stays unless another choice attains more than this above it, and more in every draw."""
STEP_RATIO = 0.002
"""An option changes if this raises the attainment by more."""
BEHIND_RATIO = 0.03
"""A choice this far behind the best one so far is played no further."""
ROUNDS_MAX = 2
PUBLISHED = (
    "sarathi", "splitwise", "mooncake", "arrow", "distserve", "conserve", "ampd", "pla", "cache-aware-global", "dynamo",
    "llm-d", "sglang", "llumnix",
)  # fmt: skip
HEADROOM, CHUNKS = "admission", "batching"
"""Families whose options change. Routing and placement share those of admission, which names the same policy."""
Options = Mapping[tuple[str, str], float | bool]
"""Values by family and option."""
CHANGES: tuple[Options, ...] = (
    *({(HEADROOM, "miss_ratio_max"): value} for value in (0.15, 0.5, 0.8, 1.0)),
    *({(HEADROOM, "tpot_miss_ratio_max"): value} for value in (0.3, 0.8, 1.0)),
    *({(HEADROOM, "step_slack"): value, (CHUNKS, "tpot_slack"): value} for value in (0.75, 0.97)),
    *({(HEADROOM, "mixing_ratio"): value} for value in (1.0, 1.8)),
    *({(HEADROOM, "lends_above"): value} for value in (0.6, 1.2)),
    *({(HEADROOM, "ttft_slack"): value} for value in (0.8, 1.1)),
    *({(HEADROOM, "tpot_slack"): value} for value in (0.85, 1.15)),
    *({(CHUNKS, "shared_ratio"): value} for value in (0.05, 0.25, 0.5)),
    {(HEADROOM, "hands_off"): False},
    {(HEADROOM, "fetches"): False},
)
"""Tried one after the other. A step's prompts and the prediction of them share one slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPolicy:
    """The chosen policies, with the SLO attainment in each draw that they were chosen by."""

    choice: PolicyChoice
    """Equal to `PolicyChoice()` if the default set stays."""
    ratios: tuple[float, ...]
    default_ratios: tuple[float, ...]
    simulations: int

    @property
    def name(self) -> str:
        """The choice in words: the set, or the changed options."""
        changed = {f"{key} {value:g}" for use in _plugins(self.choice).values() for key, value in use.options.items()}
        return self.choice.name or ", ".join(sorted(changed)) or "the default set"


@dataclass(slots=True, kw_only=True)
class _Player:
    """Plays choices on all draws, until the simulations are used up."""

    spec: ClusterSpec
    draws: Sequence[Sequence[Trace]]
    slo: Slo
    left: int
    played: int = 0
    known: dict[bytes, tuple[float, ...]] = field(default_factory=dict[bytes, tuple[float, ...]])

    def ratios(self, choice: PolicyChoice, best: tuple[float, ...] = ()) -> tuple[float, ...]:
        """Return the attainment in each draw. Empty: far behind `best`, unable to serve, or out of simulations."""
        key = msgspec.json.encode(choice)
        if key in self.known:
            return self.known[key]
        found: tuple[float, ...] = ()
        for draw in self.draws:
            behind = fmean(best[: len(found)]) - fmean(found) if best and found else 0.0
            if behind > BEHIND_RATIO or self.left < len(draw):
                found = ()
                break
            self.left -= len(draw)
            self.played += len(draw)
            found += (fmean(attainment_ratio(self.spec, trace, self.slo, resolve(choice)) for trace in draw),)
        self.known[key] = found
        return found


def attainment_ratio(spec: ClusterSpec, trace: Trace, slo: Slo, policy: str | PolicyConfig) -> float:
    """Return the share of a trace's requests that met both targets in simulation."""
    targets = SloTargets(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
    return fmean(targets.met_by(record) for record in replay_trace(spec, trace, policy=policy, seed=0, slo=slo))


def tune(
    spec: ClusterSpec,
    draws: Sequence[Sequence[Trace]],
    slo: Slo,
    *,
    simulations_max: int,
    tell: Callable[[str], None],
) -> TunedPolicy:
    """Return the policies with the highest mean SLO attainment over the draws, each at several rates.

    Published sets are played first, then the default set with one option changed after another. The default set stays
    unless the best choice is `MARGIN_RATIO` better, and better in every draw. `tell` receives the progress. The same
    arguments give the same result. Raise ConfigError if the simulations do not suffice for the default set.
    """
    player = _Player(spec=spec, draws=draws, slo=slo, left=simulations_max)
    usual = player.ratios(PolicyChoice())
    if not usual:
        needed = sum(len(draw) for draw in draws)
        raise ConfigError(f"{simulations_max} simulations do not suffice for the default set: give at least {needed}")
    tell(f"default set: {fmean(usual):.1%} within the SLO")
    found: list[tuple[PolicyChoice, tuple[float, ...]]] = []
    for name in PUBLISHED:
        ratios = player.ratios(PolicyChoice(name=name), usual)
        found += [(PolicyChoice(name=name), ratios)] if ratios else []
        tell(f"{name}: {fmean(ratios):.1%}" if ratios else f"{name}: far behind, or out of simulations")
    found.append(_descend(player, usual, tell))
    choice, ratios = max(found, key=lambda each: fmean(each[1]))  # the first of equals
    gains = [own - other for own, other in zip(ratios, usual, strict=True)]
    if fmean(gains) <= MARGIN_RATIO or min(gains) <= 0:
        choice, ratios = PolicyChoice(), usual
    return TunedPolicy(choice=choice, ratios=ratios, default_ratios=usual, simulations=player.played)


def judge(spec: ClusterSpec, draws: Sequence[Sequence[Trace]], slo: Slo, found: TunedPolicy) -> list[str]:
    """Return lines that compare a choice with the default set on other draws, a line for each load."""
    lines: list[str] = []
    for load, traces in zip(LOADS, zip(*draws, strict=True), strict=True):
        own, usual = (
            fmean(attainment_ratio(spec, each, slo, resolve(choice)) for each in traces)
            for choice in (found.choice, PolicyChoice())
        )
        lines.append(f"at {load:g} times the rate {own:.1%} are within the SLO, with the default set {usual:.1%}")
    return lines


def _descend(
    player: _Player, usual: tuple[float, ...], tell: Callable[[str], None]
) -> tuple[PolicyChoice, tuple[float, ...]]:
    """Return the default set with the options that raise the attainment, and its attainment in each draw."""
    options: Options = {}
    best = usual
    for _ in range(ROUNDS_MAX):
        before = options
        for change in CHANGES:
            ratios = player.ratios(choice_of({**options, **change}), best)
            if ratios and fmean(ratios) > fmean(best) + STEP_RATIO:
                options, best = {**options, **change}, ratios
                words = ", ".join(f"{option} {value:g}" for (_, option), value in change.items())
                tell(f"{words}: {fmean(best):.1%}")
        if options == before:
            break
    return choice_of(options), best


def choice_of(options: Options) -> PolicyChoice:
    """Return the default set with these options."""
    changed: dict[str, dict[str, float | bool]] = {}
    for (family, option), value in options.items():
        changed.setdefault(family, {})[option] = value
    usual = PolicyConfig()
    return PolicyChoice(
        admission=Plugin(use=usual.admission.use, options=changed[HEADROOM]) if HEADROOM in changed else None,
        batching=Plugin(use=usual.batching.use, options=changed[CHUNKS]) if CHUNKS in changed else None,
    )


def _plugins(choice: PolicyChoice) -> dict[str, Plugin]:
    return {family: use for family, use in asdict(choice).items() if isinstance(use, Plugin)}


def draws_of(trace: Trace, rate_rps: float | None, *, requests_max: int) -> tuple[list[list[Trace]], list[list[Trace]]]:
    """Return draws of the first and of the second half of a trace's time. Each draw is a part of it at every load.

    A part has at most `requests_max` requests. The rates are `LOADS` times `rate_rps`, or times the trace's mean rate.
    Raise ConfigError if a part has fewer than `DRAW_REQUESTS_MIN` requests.
    """
    requests, mean_rps = trace.requests, mean_rate_rps(trace)
    middle_s = requests[0].at_s + (requests[-1].at_s - requests[0].at_s) / 2 if requests else 0.0
    halves = [each for each in requests if each.at_s < middle_s], [each for each in requests if each.at_s >= middle_s]
    least = min(map(len, halves)) // DRAWS
    if least < DRAW_REQUESTS_MIN or mean_rps is None:
        raise ConfigError(
            f"the {DRAWS} parts of half of the trace have {least} requests, but need {DRAW_REQUESTS_MIN} each: give a "
            "longer trace"
        )
    made: list[list[list[Trace]]] = []
    for half in halves:
        size = len(half) // DRAWS
        parts = [half[number * size :][: min(size, requests_max)] for number in range(DRAWS)]
        made.append([_at_loads(trace, part, (rate_rps or mean_rps) / mean_rps) for part in parts])
    return made[0], made[1]


def _at_loads(trace: Trace, part: Sequence[TraceRequest], scale: float) -> list[Trace]:
    from_s = part[0].at_s
    moved = tuple(replace(request, at_s=request.at_s - from_s) for request in part)
    return [scale_rate(replace(trace, requests=moved), load * scale) for load in LOADS]


def policy_toml(choice: PolicyChoice, slo: Slo, remarks: Iterable[str]) -> str:
    """Return a choice and the SLO as a configuration for `baton serve --config`, after remarks as comments."""
    lines = [*(f"# {remark}" for remark in remarks), "[slo]", f"ttft_s = {slo.ttft_s}", f"tpot_s = {slo.tpot_s}"]
    return "\n".join([*lines, *policy_lines(choice)]) + "\n"


def policy_lines(choice: PolicyChoice) -> list[str]:
    """Return the tables of a choice in TOML. Empty for the default set."""
    lines = ["", "[policy]", f'name = "{choice.name}"'] if choice.name else []
    for family, use in _plugins(choice).items():
        options = ", ".join(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in use.options.items())
        lines += ["", f"[policy.{family}]", f'use = "{use.use}"', f"options = {{ {options} }}"]
    return lines
