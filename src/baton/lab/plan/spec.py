"""Input of `baton plan`: keys of a file or the command line, validated together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.core.validation import Bandwidth, Number, Range, out_of_range, type_problems
from baton.decide.cost.catalog import hardware
from baton.decide.cost.custom_hardware import CustomHardware, described
from baton.decide.cost.engine_profile import engine_profile
from baton.decide.cost.handoff import HandoffLink
from baton.decide.cost.model import Format, KVFormat, ModelShape
from baton.decide.cost.parallel import Precision
from baton.decide.cost.spec import read_model
from baton.lab.plan.admission import Admission
from baton.lab.plan.demand import LengthClass, WorkloadDemand, strata
from baton.lab.plan.options import GpuStock, HandoffPath, Objective, OptionRanges
from baton.lab.plan.search import Shape
from baton.lab.plan.tiers import TierSpec
from baton.lab.workload.request import TraceRequest
from baton.lab.workload.schedule import mean_rate_rps
from baton.lab.workload.source import read_workload

Found = TypeVar("Found")
Some = Annotated[int, Range(above=0)]
Limit = Annotated[float, Range(above=0.0, such_as="seconds, such as 0.05")]
Rate = Annotated[float, Range(above=0.0, such_as="requests/s, such as 10")]
Dollars = Annotated[float, Range(above=0.0, such_as="USD of one GPU and hour, such as 2.5")]
Degree = Annotated[int, Range(least=1, such_as="a number of GPUs, such as 1")]


class HardwareSpec(CustomHardware, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GPUs of one kind: a catalogue name, or a custom description by the other keys."""

    gpus: Some
    usd_per_hour: Dollars | None = None
    """Price of one GPU. None: the catalogue's price."""
    link_bytes_per_s: Bandwidth | None = None
    """Bandwidth between hosts per GPU. None: the hardware's own bandwidth."""
    lost_ratio: Annotated[float, Range(least=0.0, most=0.9, such_as="a share of a pool, such as 0.2")] = 0.0
    """Share of a pool that may be lost at once, as spot instances are. The others carry the asked rate."""

    @property
    def own(self) -> CustomHardware | None:
        """Custom description of the hardware. None: the catalogue's entry applies, except for a given price."""
        if not self.like and self.given.keys() <= {"usd_per_hour"}:
            return None
        return CustomHardware(name=self.name, like=self.like, **self.given)


class SloSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency targets, and the share of requests that must meet them."""

    ttft_s: Limit
    tpot_s: Limit
    attainment_ratio: float = 0.9


class WorkloadSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trace file, or mean lengths."""

    trace: str = ""
    input_tokens: Number = 0
    output_tokens: Number = 0
    rate_rps: Rate | None = None
    """Request rate. None: the trace's rate, or without a trace the highest that the hardware serves."""
    cached_ratio: float = 0.0
    """Expected share of prompt tokens in the prefix cache."""
    day_rates_rps: tuple[Rate, ...] = ()
    """Request rate of each hour of the day. The fleet is planned for the highest one."""
    growth_ratio: Annotated[float, Range(least=0.0, such_as="growth per month, such as 0.1")] = 0.0
    """Growth of the rate per month, to plan the next purchases."""


class PlanSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of `baton plan`."""

    llm: str
    hardware: tuple[HardwareSpec, ...]
    slo: SloSpec
    workload: WorkloadSpec
    objective: Objective = "goodput-per-dollar"
    engine: str = "vllm-v1"
    weights: tuple[Format, ...] = ("bf16",)
    kv: tuple[KVFormat, ...] = ("bf16",)
    tp: tuple[Degree, ...] = (1, 2, 4, 8)
    pp: tuple[Degree, ...] = (1,)
    cp: tuple[Degree, ...] = (1,)
    shape: Shape = "best"
    pool_penalty_ratio: Annotated[float, Range(least=0.0, such_as="a share of the price, such as 0.05")] = 0.05
    """Share of the price that each pool beyond one per role must save."""
    spare_workers: Number = 0
    """Workers of each pool that may be lost while the others carry the asked rate (1: N+1)."""
    spare_hosts: Number = 0
    """Hosts that may fail while the others carry the asked rate, if each pool is spread evenly over its hosts."""
    admission: tuple[Admission, ...] = ("slo", "all")
    """Admission modes to compare: `slo` rejects requests that are predicted to miss the SLO. The first one verifies."""
    tiers: tuple[TierSpec, ...] = ()
    """Tiers below the arenas to compare one by one, and with no tier. They need a trace whose requests share
    prefixes."""
    reach: HandoffPath | None = None
    """Path of handoffs. None: `node` if one node holds all GPUs, else `network`."""
    wire: HandoffLink | None = None
    """Link for handoffs between hosts, per worker. None: the hardware's link."""
    finalists: Number = 2
    """Number of fleets to simulate. 0: no simulation."""
    requests: Some = 400
    """Lower bound on the requests that each simulation judges."""
    seed: int = 0
    tune: bool = False
    """Choose the policies of the recommended fleet by simulation, for the server's configuration."""


class PlanInput(Struct, frozen=True, kw_only=True):
    """Validated input of a plan, with model, hardware and trace loaded."""

    spec: PlanSpec
    demand: WorkloadDemand
    stocks: tuple[GpuStock, ...]
    choices: OptionRanges
    same_host: bool
    requests: tuple[TraceRequest, ...] = ()
    """Requests of the trace. Empty without a trace."""


def read_plan_input(raw: Mapping[str, Any], folder: Path) -> PlanInput:
    """Return the validated input with all names resolved. Raises ConfigError with every problem, one per line."""
    wrong = type_problems(raw, PlanSpec)
    if wrong:
        raise ConfigError("\n".join(f"not a valid plan: {problem}" for problem in wrong))
    spec = msgspec.convert(raw, PlanSpec)
    problems = _range_problems(spec)
    model = _try(problems, lambda: read_model(spec.llm, folder))
    stocks = _stocks(spec, problems)
    lengths, rate_rps, requests = _try(problems, lambda: _lengths(spec.workload, folder)) or ((), None, ())
    problems += _tier_problems(spec, requests)
    if stocks:
        _try(problems, lambda: engine_profile(spec.engine, llm=spec.llm, gpu=stocks[0].hardware, tp=1))
    if model is not None and model.context_tokens_max:
        problems += _context_problems(spec, model, lengths)
    if problems or model is None:
        raise ConfigError("\n".join(problems))
    demand = WorkloadDemand(
        rate_rps=spec.workload.rate_rps or max(spec.workload.day_rates_rps, default=rate_rps),
        lengths=lengths,
        cached_ratio=spec.workload.cached_ratio,
        slo=Slo(ttft_s=spec.slo.ttft_s, tpot_s=spec.slo.tpot_s),
        attainment_ratio=spec.slo.attainment_ratio,
    )
    if spec.objective == "cheapest" and demand.rate_rps is None:
        raise ConfigError("objective cheapest needs a rate: give --rate R, or a trace with times of arrival")
    reserved = (
        spec.spare_workers
        or spec.spare_hosts
        or any(stock.lost_ratio for stock in stocks)
        or spec.workload.growth_ratio
    )
    if reserved and demand.rate_rps is None:
        raise ConfigError(
            "spare_workers, spare_hosts, lost_ratio and growth_ratio need a rate: give --rate R, or a trace with times"
        )
    precisions = tuple(Precision(weights=weights, kv=kv) for weights in spec.weights for kv in spec.kv)
    choices = OptionRanges(model=model, engine=spec.engine, precisions=precisions, tp=spec.tp, pp=spec.pp, cp=spec.cp)
    one_node = len(stocks) == 1 and stocks[0].gpus <= stocks[0].hardware.gpus_per_node
    same_host = spec.reach == "node" if spec.reach else one_node
    return PlanInput(spec=spec, demand=demand, stocks=stocks, choices=choices, same_host=same_host, requests=requests)


def _try(problems: list[str], read: Callable[[], Found]) -> Found | None:
    """Return the result of `read`, or None if it raises ConfigError. The messages are added to `problems`."""
    try:
        return read()
    except ConfigError as error:
        problems += str(error).splitlines()
        return None


def _range_problems(spec: PlanSpec) -> list[str]:
    found = out_of_range(spec)
    if spec.workload.rate_rps and spec.workload.day_rates_rps:
        found.append("workload.rate_rps and workload.day_rates_rps are both given: leave one of them out")
    if spec.workload.trace and (spec.workload.input_tokens or spec.workload.output_tokens):
        found.append("workload.trace has the lengths: leave out workload.input_tokens and workload.output_tokens")
    if not 0 < spec.slo.attainment_ratio < 1:
        found.append(f"slo.attainment_ratio is {spec.slo.attainment_ratio:g}, but must be between 0 and 1: try 0.9")
    if not 0 <= spec.workload.cached_ratio < 1:
        found.append(f"workload.cached_ratio is {spec.workload.cached_ratio:g}, but must be at least 0 and below 1")
    if not spec.hardware:
        found.append("no hardware: name at least one kind of GPU, such as --hardware H100-80G-SXM=8")
    lists = {
        "admission": (spec.admission, "slo, all, or both"), "weights": (spec.weights, "a format, such as bf16"),
        "kv": (spec.kv, "a format, such as bf16"), "tp": (spec.tp, "a degree, such as 1"),
        "pp": (spec.pp, "a degree, such as 1"), "cp": (spec.cp, "a degree, such as 1"),
    }  # fmt: skip
    return found + [f"{key} is empty: name {what}" for key, (values, what) in lists.items() if not values]


def _stocks(spec: PlanSpec, problems: list[str]) -> tuple[GpuStock, ...]:
    stocks: list[GpuStock] = []
    for each in spec.hardware:
        own = each.own
        try:
            gpu = hardware(each.name) if own is None else described(own)
        except ConfigError as error:
            problems.append(str(error))
            continue
        price = each.usd_per_hour if each.usd_per_hour is not None else gpu.usd_per_hour
        if price is None and spec.objective in ("cheapest", "goodput-per-dollar"):
            problems.append(
                f"no price is known for {gpu.name}, and the objective is {spec.objective}: give --hardware "
                f"{gpu.name}={each.gpus}@USD (per GPU and hour; usd_per_hour in a file), or --objective goodput-per-gpu"
            )
        stocks.append(
            GpuStock(
                hardware=gpu,
                gpus=each.gpus,
                usd_per_hour=price,
                link_bytes_per_s=each.link_bytes_per_s,
                own=own,
                lost_ratio=each.lost_ratio,
            )
        )
    return tuple(stocks)


def _context_problems(spec: PlanSpec, model: ModelShape, lengths: tuple[LengthClass, ...]) -> list[str]:
    """Return a problem if more requests exceed the model's context than may miss the SLO."""
    limit = model.context_tokens_max
    longer = [each for each in lengths if each.input_tokens + each.output_tokens > limit]
    if not longer or sum(each.weight for each in longer) <= 1 - spec.slo.attainment_ratio:
        return []
    longest = max(longer, key=lambda each: each.input_tokens + each.output_tokens)
    return [
        f"{model.name} reads {limit} tokens of context, and the workload has prompts of {longest.input_tokens} tokens "
        f"with answers of {longest.output_tokens}: choose a model that reads more, or shorter requests"
    ]


def _tier_problems(spec: PlanSpec, requests: tuple[TraceRequest, ...]) -> list[str]:
    found: list[str] = []
    if spec.tiers and spec.workload.cached_ratio:
        found.append("tiers and workload.cached_ratio are both given: with tiers, hits are counted in the trace")
    if spec.tiers and not any(request.prefix_ids for request in requests):
        found.append("tiers need a trace whose requests share prefixes (docs/workloads.md has the formats)")
    return found


def _lengths(
    workload: WorkloadSpec, folder: Path
) -> tuple[tuple[LengthClass, ...], float | None, tuple[TraceRequest, ...]]:
    """Return the length classes, the rate and the requests of the trace, or one class of the given mean lengths."""
    if workload.trace:
        trace = read_workload(folder / workload.trace, seed=0)
        pairs = [(request.input_tokens, request.output_tokens) for request in trace.requests]
        if not pairs:
            raise ConfigError(f"{workload.trace}: has no requests")
        return strata(pairs), mean_rate_rps(trace), trace.requests
    lengths = {"workload.input_tokens": workload.input_tokens, "workload.output_tokens": workload.output_tokens}
    missing = [name for name, tokens in lengths.items() if tokens < 1]
    if missing:
        raise ConfigError(f"no workload: give a trace, or {' and '.join(missing)} above 0")
    return (LengthClass(workload.input_tokens, workload.output_tokens, 1.0),), None, ()
