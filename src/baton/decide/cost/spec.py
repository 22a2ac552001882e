"""The keys of a `cost` section for each cost model, and the construction of the models.

`SpeculativeCost` combines two of them: a target and its draft model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Struct, structs

from baton.core.errors import ConfigError
from baton.core.files import in_file
from baton.core.ports import CostModel
from baton.core.types import StepShape
from baton.core.validation import Count, Factor, Range, Ratio, did_you_mean
from baton.decide.cost.catalog import hardware, model_shape
from baton.decide.cost.custom_hardware import CustomHardware, described
from baton.decide.cost.engine_profile import EngineProfile, Phase, engine_profile
from baton.decide.cost.fitted import FittedCost, checked, read_fitted
from baton.decide.cost.handoff import HandoffLink
from baton.decide.cost.hardware import Hardware
from baton.decide.cost.linear import LinearCost
from baton.decide.cost.model import Format, KVFormat, ModelShape, shape_from_config
from baton.decide.cost.parallel import Parallel, Precision, draft_parallel, split_memory, worker_problems
from baton.decide.cost.roofline import RooflineCost
from baton.decide.cost.table import TableSetting, distserve_table, splitwise_sim, splitwise_table, vidur_layer


def accepted_tokens(*, draft_tokens: int, acceptance_ratio: float) -> float:
    """Return the mean number of tokens per check: accepted drafts and the one that the target adds.

    Source: Leviathan et al. (2023), (1 - a^(n+1)) / (1 - a) for independent acceptance.
    """
    return sum(acceptance_ratio**place for place in range(draft_tokens + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeCost:
    """Cost of a target model that checks `draft_tokens` of a draft model. Implements `CostModel`.

    A simulated decode step yields one token, so it costs a check divided by the mean tokens per check. Steps
    with prompt tokens run without drafts.
    """

    target: CostModel
    """The target without drafts."""
    check: CostModel
    """The target with `query_tokens` = 1 + draft_tokens."""
    draft: CostModel
    draft_tokens: int
    acceptance_ratio: float

    @property
    def _tokens(self) -> float:
        return accepted_tokens(draft_tokens=self.draft_tokens, acceptance_ratio=self.acceptance_ratio)

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        return self.target.prefill_s(new_tokens=new_tokens, cached_tokens=cached_tokens)

    def step_s(self, shape: StepShape) -> float:
        if shape.prefill_tokens:
            return self.target.step_s(shape)
        return (self.check.step_s(shape) + self.draft_tokens * self.draft.step_s(shape)) / self._tokens

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        checks_s = self.check.decode_run_s(requests=requests, context_tokens=context_tokens, steps=steps)
        drafts_s = self.draft.decode_run_s(requests=requests, context_tokens=context_tokens, steps=steps)
        tokens = self._tokens
        return [
            (check_s + self.draft_tokens * draft_s) / tokens
            for check_s, draft_s in zip(checks_s, drafts_s, strict=True)
        ]

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        return self.target.handoff_s(tokens=tokens, same_host=same_host)

    def on(self, kind: str) -> SpeculativeCost:
        return self


class KindFacts(Struct, frozen=True, kw_only=True):
    """Properties of one kind of worker. 0: the cost model does not know the value."""

    gpus: int = 0
    kv_tokens_max: int = 0
    """KV tokens that fit beside the weights."""
    kv_token_bytes: float = 0.0
    usd_per_hour: float = 0.0
    """Price of the whole worker."""
    power_w: float = 0.0
    """Rated power of the whole worker with its share of the node."""
    notes: tuple[str, ...] = ()
    """Values that were taken from other hardware or engines because they have not been measured."""


Built = tuple[CostModel, KindFacts]
Dollars = Annotated[float, Range(least=0.0, such_as="USD of one GPU and hour, such as 2.5")]
IDEAL = EngineProfile(name="ideal", version="1", prompt=Phase(factor=1.0), decode=Phase(factor=1.0))


class DraftSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft model for speculative decoding, on the same GPUs."""

    llm: str
    tokens: Count = 4
    acceptance_ratio: Ratio = 0.7


class RooflineSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a section with `model: roofline`."""

    llm: str | ModelShape
    """Name of a model, path of a `config.json`, or the sizes."""
    hardware: str | CustomHardware
    """Name of a GPU, or its description."""
    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    dcp: Count = 1
    dp: Count = 1
    ep: Count = 1
    overlap_tokens_min: Annotated[int, Range(least=0)] = 0
    weights: Format = "bf16"
    kv: KVFormat = "bf16"
    engine: str | EngineProfile = "vllm-v1"
    wire: HandoffLink | None = None
    draft: DraftSpec | None = None
    usd_per_hour: Dollars | None = None
    """Price of one GPU. None: that of the catalogue."""


class TableSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a section with `model: table`."""

    profile: str
    """splitwise, distserve or vidur."""
    llm: str | ModelShape
    hardware: str = "A100-80G-SXM"
    tp: Count = 1
    pp: Count = 1
    engine: str = ""
    """For the profile distserve: distserve or vllm. For vidur: as for roofline."""
    prompt_factor: Factor = 1.0
    """Factor on prompt time: 1.3 for a GPU capped at 70 % of its power (Splitwise)."""
    wire: HandoffLink | None = None


class SplitwiseSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a section with `model: splitwise-sim`."""

    llm: str | ModelShape
    hardware: str
    tp: Count = 8
    prompt_factor: Factor = 1.0
    wire: HandoffLink | None = None


class FittedSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a section with `model: fitted`."""

    file: str = ""
    """A saved fit, a step profile, a worker's step log, or the folder of step logs (`step_log`)."""
    fit: FittedCost | None = None
    """The fit itself, instead of `file`."""


AnySpec = RooflineSpec | TableSpec | SplitwiseSpec | LinearCost | FittedSpec
SPECS: dict[str, type[AnySpec]] = {
    "linear": LinearCost,
    "roofline": RooflineSpec,
    "table": TableSpec,
    "splitwise-sim": SplitwiseSpec,
    "fitted": FittedSpec,
}


def _fitted(spec: FittedSpec, folder: Path) -> FittedCost:
    if (spec.fit is None) != bool(spec.file):
        raise ConfigError("a fitted model has one of `file` and `fit`: name a saved fit, a step profile or step logs")
    return checked(spec.fit) if spec.fit is not None else read_fitted(folder / spec.file)


def build(spec: AnySpec, folder: Path) -> Built:
    """Build a cost model. Files are relative to `folder`. Raise ConfigError with every problem."""
    match spec:
        case LinearCost():
            return spec, KindFacts()
        case FittedSpec():
            return _fitted(spec, folder), KindFacts()
        case RooflineSpec():
            return _roofline(spec, folder)
        case TableSpec():
            return _table(spec, folder)
        case SplitwiseSpec():
            setting, facts = _setting(spec, folder)
            return splitwise_sim(setting), facts


def is_model_file(llm: str) -> bool:
    """Return whether a model is given as a `config.json` and not by name."""
    return llm.endswith(".json")


def read_model(llm: str | ModelShape, folder: Path) -> ModelShape:
    """Return a model by its name, `config.json`, or sizes. Raise ConfigError if it is unknown or invalid."""
    if isinstance(llm, ModelShape):
        problems = llm.problems()
        if problems:
            raise ConfigError("\n".join(problems))
        return llm
    if is_model_file(llm):
        path = folder / llm
        with in_file(path, "the model"):
            return shape_from_config(path.read_text(encoding="utf-8"), name=path.parent.name or path.stem)
    return model_shape(llm)


def _named(llm: str | ModelShape, gpu: str | CustomHardware, folder: Path) -> tuple[ModelShape, Hardware]:
    """Return the model and the GPU. Raise ConfigError with the problems of both."""
    problems: list[str] = []
    try:
        model = read_model(llm, folder)
    except ConfigError as error:
        problems.append(str(error))
        model = None
    try:
        found = hardware(gpu) if isinstance(gpu, str) else described(gpu)
    except ConfigError as error:
        problems.append(str(error))
        found = None
    if model is None or found is None:
        raise ConfigError("\n".join(problems))
    return model, found


def _roofline(spec: RooflineSpec, folder: Path) -> Built:
    model, gpu = _named(spec.llm, spec.hardware, folder)
    parallel = Parallel(
        tp=spec.tp,
        pp=spec.pp,
        cp=spec.cp,
        dcp=spec.dcp,
        dp=spec.dp,
        ep=spec.ep,
        overlap_tokens_min=spec.overlap_tokens_min,
    )
    precision = Precision(weights=spec.weights, kv=spec.kv)
    draft, problems = _draft_model(spec.draft)
    problems += worker_problems(model, gpu, parallel, precision, draft)
    engine = spec.engine
    try:
        if isinstance(engine, str):
            engine = engine_profile(engine, llm=model.name, gpu=gpu, tp=spec.tp)
    except ConfigError as error:
        problems.append(str(error))
    if problems or isinstance(engine, str):
        raise ConfigError("\n".join(problems))
    cost = RooflineCost(
        model=model, hardware=gpu, parallel=parallel, precision=precision, engine=engine,
        wire=spec.wire,
    )  # fmt: skip
    facts = facts_of(cost, draft)
    if spec.usd_per_hour is not None:
        facts = structs.replace(facts, usd_per_hour=spec.usd_per_hour * parallel.gpus)
    if spec.draft is None or draft is None:
        return cost, facts
    return _drafted(cost, spec.draft, draft), facts


def _draft_model(draft: DraftSpec | None) -> tuple[ModelShape | None, list[str]]:
    """Return the draft's model, and its problems. Without a draft: None and no problems."""
    if draft is None:
        return None, []
    try:
        return model_shape(draft.llm), []
    except ConfigError as error:
        return None, [f"draft: {error}"]


def _drafted(cost: RooflineCost, draft: DraftSpec, small: ModelShape) -> SpeculativeCost:
    return SpeculativeCost(
        target=cost,
        check=dataclasses.replace(cost, query_tokens=1 + draft.tokens),
        draft=dataclasses.replace(cost, model=small, parallel=draft_parallel(small, cost.parallel)),
        draft_tokens=draft.tokens,
        acceptance_ratio=draft.acceptance_ratio,
    )


def facts_of(cost: RooflineCost, draft: ModelShape | None = None) -> KindFacts:
    """Return the properties of a worker. `draft`: its draft model."""
    gpu, gpus = cost.hardware, cost.parallel.gpus
    return KindFacts(
        gpus=gpus,
        kv_tokens_max=split_memory(cost.model, gpu, cost.parallel, cost.precision, draft).kv_tokens,
        kv_token_bytes=cost.kv_token_bytes,
        usd_per_hour=(gpu.usd_per_hour or 0.0) * gpus,
        power_w=gpu.gpu_share_w * gpus,
        notes=tuple(note for note in (gpu.note, cost.engine.note) if note),
    )


def _setting(spec: TableSpec | SplitwiseSpec, folder: Path) -> tuple[TableSetting, KindFacts]:
    """Return the setting of a table, and the worker's properties, which tables lack, by a roofline model."""
    model, gpu = _named(spec.llm, spec.hardware, folder)
    pp = spec.pp if isinstance(spec, TableSpec) else 1
    likeness = RooflineCost(model=model, hardware=gpu, parallel=Parallel(tp=spec.tp, pp=pp), engine=IDEAL)
    facts = facts_of(likeness)
    setting = TableSetting(
        llm=model.name,
        hardware=gpu.name,
        tp=spec.tp,
        wire=spec.wire or HandoffLink(bytes_per_s=gpu.inter_node_bytes_per_s * facts.gpus),
        kv_token_bytes=facts.kv_token_bytes,
        prompt_factor=spec.prompt_factor,
    )
    return setting, facts


def _table(spec: TableSpec, folder: Path) -> Built:
    setting, facts = _setting(spec, folder)
    match spec.profile:
        case "splitwise":
            return splitwise_table(setting), facts
        case "distserve":
            return distserve_table(setting, engine=spec.engine or "distserve", pp=spec.pp), facts
        case "vidur":
            return _vidur(spec, setting), facts
        case _:
            known = ("splitwise", "distserve", "vidur")
            hint = did_you_mean(spec.profile, known)
            raise ConfigError(f"profile is {spec.profile!r}{hint}; known: {', '.join(known)}")


def _vidur(spec: TableSpec, setting: TableSetting) -> RooflineCost:
    """Return a roofline model with Vidur's measured layers."""
    curve = vidur_layer(llm=setting.llm, gpu=setting.hardware, tp=setting.tp)
    profile = engine_profile(spec.engine or "ideal", llm=setting.llm, gpu=hardware(setting.hardware), tp=setting.tp)
    parallel = Parallel(tp=spec.tp, pp=spec.pp)
    return RooflineCost(
        model=model_shape(setting.llm), hardware=hardware(setting.hardware), parallel=parallel, engine=profile,
        wire=setting.wire, measured_layer=curve,
    )  # fmt: skip
