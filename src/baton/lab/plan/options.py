"""Build the worker options that the hardware allows, and explain why the others are impossible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from baton.decide.cost.custom_hardware import CustomHardware
from baton.decide.cost.engine_profile import engine_profile
from baton.decide.cost.handoff import HandoffLink
from baton.decide.cost.hardware import Hardware
from baton.decide.cost.model import ModelShape
from baton.decide.cost.parallel import Parallel, Precision, experts_gpus_max, worker_problems
from baton.decide.cost.roofline import RooflineCost
from baton.decide.cost.spec import KindFacts, facts_of

HandoffPath = Literal["node", "network"]
"""Path of a handoff: inside a node, or over the network."""
Objective = Literal["cheapest", "goodput-per-dollar", "goodput-per-watt", "goodput-per-gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStock:
    """Available GPUs of one kind."""

    hardware: Hardware
    gpus: int
    usd_per_hour: float | None
    """Price of one GPU. None: unknown."""
    link_bytes_per_s: float | None = None
    """Bandwidth between hosts per GPU. None: the hardware's own bandwidth."""
    own: CustomHardware | None = None
    """Custom description of the hardware. None: the catalogue's entry applies."""
    lost_ratio: float = 0.0
    """Share of a pool that may be lost at once, as spot instances are."""

    @property
    def name(self) -> str:
        """Name of the GPU, with its link bandwidth if that was given, so that stocks of one GPU remain distinct."""
        link = self.link_bytes_per_s
        return self.hardware.name if link is None else f"{self.hardware.name} at {link / 1e9:g} GB/s"

    @property
    def section(self) -> str | dict[str, Any]:
        """GPU as the `hardware` key of a cost section."""
        return self.hardware.name if self.own is None else self.own.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOption:
    """One kind of worker: GPUs, parallelism and precision."""

    stock: GpuStock
    cost: RooflineCost
    facts: KindFacts
    tier_usd_per_hour: float = 0.0
    """Price of the worker's share of a KV tier."""

    @property
    def name(self) -> str:
        """Name such as `A100-80G-SXM tp2 pp2 fp8`."""
        parallel, precision = self.cost.parallel, self.cost.precision
        degrees = (
            ("tp", parallel.tp),
            ("pp", parallel.pp),
            ("cp", parallel.cp),
            ("dp", parallel.dp),
            ("ep", parallel.ep),
        )
        cut = " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "tp1"
        formats = "" if precision.weights == "bf16" else f" {precision.weights}"
        formats += "" if precision.kv == "bf16" else f" kv-{precision.kv}"
        return f"{self.stock.name} {cut}{formats}"

    @property
    def usd_per_hour(self) -> float:
        """Price of one worker."""
        return (self.stock.usd_per_hour or 0.0) * self.facts.gpus + self.tier_usd_per_hour

    def price(self, objective: Objective) -> float:
        """Return the price of one worker in the objective's unit."""
        match objective:
            case "goodput-per-gpu":
                return float(self.facts.gpus)
            case "goodput-per-watt":
                return self.facts.power_w
            case "cheapest" | "goodput-per-dollar":
                return self.usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRanges:
    """Ranges of parallelism and precision to try."""

    model: ModelShape
    engine: str
    precisions: tuple[Precision, ...]
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...] = (1,)


def without_losses(options: Sequence[WorkerOption]) -> list[WorkerOption]:
    """Return the options as if no worker could be lost."""
    return [replace(option, stock=replace(option.stock, lost_ratio=0.0)) for option in options]


def build_options(
    choices: OptionRanges, stocks: tuple[GpuStock, ...], wire: HandoffLink | None
) -> tuple[list[WorkerOption], list[str]]:
    """Return every worker that the hardware allows, and the distinct problems of the others."""
    found: list[WorkerOption] = []
    out: list[str] = []
    for stock in stocks:
        layouts = list(_parallel_layouts(choices, stock))
        if not layouts:
            out.append(_no_layout_problem(choices, stock))
        for parallel in layouts:
            for precision in choices.precisions:
                problems = worker_problems(choices.model, stock.hardware, parallel, precision)
                if problems:
                    out.append(problems[0])
                else:
                    found.append(_option(choices, stock, parallel, precision, wire))
    return found, list(dict.fromkeys(out))  # other context parallel degrees repeat the same problem


def _no_layout_problem(choices: OptionRanges, stock: GpuStock) -> str:
    """Return the error that no combination of parallel degrees fits the stock, with degrees to try instead."""
    name, node = stock.hardware.name, stock.hardware.gpus_per_node
    tp, pp, cp = min(choices.tp), min(choices.pp), min(choices.cp)
    widest = max((degree for degree in (1, 2, 4, 8, 16) if degree <= min(node, stock.gpus)), default=1)
    asked = f"a worker of tp {tp}, pp {pp} and cp {cp} takes {tp * pp * cp} GPUs"
    if tp * cp > node:
        return (
            f"{asked}; {tp * cp} of them (tp x cp) must be in one node, but a node of {name} has {node}: "
            f"try --tp {widest} --cp 1, or less"
        )
    return f"{asked}, but there are {stock.gpus} of {name}: try --tp {widest} --pp 1 --cp 1, or more GPUs"


def _parallel_layouts(choices: OptionRanges, stock: GpuStock) -> Iterator[Parallel]:
    """Yield the parallel layouts that fit the stock.

    Tensor and context parallelism stay inside a node. Experts are spread over all GPUs of a stage, or over many
    attention groups.
    """
    experts = choices.model.experts
    for tp in choices.tp:
        for pp in choices.pp:
            for cp in choices.cp:
                if tp * cp <= stock.hardware.gpus_per_node and tp * pp * cp <= stock.gpus:
                    ep = 1 if experts is None else experts_gpus_max(tp * cp, experts.experts)
                    yield Parallel(tp=tp, pp=pp, cp=cp, ep=ep)
    if experts is not None:
        for dp in (8, 16, 32, 64, 144):
            if dp <= min(stock.gpus, experts.experts):
                yield Parallel(dp=dp, ep=dp)


def _option(
    choices: OptionRanges, stock: GpuStock, parallel: Parallel, precision: Precision, wire: HandoffLink | None
) -> WorkerOption:
    engine = engine_profile(choices.engine, llm=choices.model.name, gpu=stock.hardware, tp=parallel.tp)
    if wire is None and stock.link_bytes_per_s is not None:
        wire = HandoffLink(bytes_per_s=stock.link_bytes_per_s * parallel.gpus)
    cost = RooflineCost(
        model=choices.model, hardware=stock.hardware, parallel=parallel, precision=precision, engine=engine, wire=wire
    )
    return WorkerOption(stock=stock, cost=cost, facts=facts_of(cost))
