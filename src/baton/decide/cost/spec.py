"""The keys of a cost section, model by model, and what is built from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from msgspec import Struct, structs

from baton.core.errors import ConfigError
from baton.core.files import in_file
from baton.core.ports import CostModel
from baton.core.validation import Count, Factor, Price, Range, Ratio, Seconds, did_you_mean
from baton.decide.cost.catalog import hardware, model_shape
from baton.decide.cost.config_json import shape_from_config
from baton.decide.cost.custom_hardware import CustomHardware, described
from baton.decide.cost.engine_profile import EngineProfile, Phase, engine_profile
from baton.decide.cost.fitted import FittedCost, checked
from baton.decide.cost.handoff import HandoffLink
from baton.decide.cost.hardware import Hardware
from baton.decide.cost.linear import LinearCost
from baton.decide.cost.model import Format, KVFormat, ModelShape
from baton.decide.cost.parallel import Parallel, Precision, draft_parallel, split_memory, worker_problems
from baton.decide.cost.roofline import RooflineCost
from baton.decide.cost.speculative import SpeculativeCost
from baton.decide.cost.step_logs import read_fitted
from baton.decide.cost.table import TableSetting, distserve_table, splitwise_sim, splitwise_table, vidur_layer


class KindFacts(Struct, frozen=True, kw_only=True):
    """What else a section says about workers of one kind. 0 where the cost model does not know."""

    gpus: int = 0
    kv_tokens_max: int = 0
    """Tokens whose KV fits beside the weights."""
    kv_token_bytes: float = 0.0
    usd_per_hour: float = 0.0
    """Of the whole worker."""
    power_w: float = 0.0
    """Rated, of the whole worker with its share of the node."""
    notes: tuple[str, ...] = ()
    """What was borrowed because it has not been measured."""


Built = tuple[CostModel, KindFacts]
Dollars = Annotated[float, Range(least=0.0, such_as="USD of one GPU and hour, such as 2.5")]
Overhead = Annotated[float, Range(above=0.0, such_as="seconds, such as 0.039: every step takes a while")]
IDEAL = EngineProfile(name="ideal", version="1", prompt=Phase(factor=1.0), decode=Phase(factor=1.0))


class DraftSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft model for speculative decoding, on the same GPUs."""

    llm: str
    tokens: Count = 4
    acceptance_ratio: Ratio = 0.7


class RooflineSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model: roofline`."""

    llm: str | ModelShape
    """A name, a path to a `config.json`, or the sizes themselves."""
    hardware: str | CustomHardware
    """A name, or a description."""
    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    dp: Count = 1
    ep: Count = 1
    weights: Format = "bf16"
    kv: KVFormat = "bf16"
    engine: str | EngineProfile = "vllm-v1"
    wire: HandoffLink | None = None
    draft: DraftSpec | None = None
    usd_per_hour: Dollars | None = None
    """Of one GPU. None: the catalogue's."""


class TableSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model: table`."""

    profile: str
    """splitwise, distserve or vidur."""
    llm: str | ModelShape
    hardware: str = "A100-80G-SXM"
    tp: Count = 1
    pp: Count = 1
    engine: str = ""
    """Of distserve: distserve or vllm. Of vidur: as for roofline."""
    prompt_factor: Factor = 1.0
    """1.3 for a GPU capped at 70 % of its power (Splitwise)."""
    wire: HandoffLink | None = None


class SplitwiseSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model: splitwise-sim`."""

    llm: str | ModelShape
    hardware: str
    tp: Count = 8
    prompt_factor: Factor = 1.0
    wire: HandoffLink | None = None


class LinearSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model: linear`: the prices of `LinearCost`, which says what each means."""

    step_overhead_s: Overhead = 0.039
    prefill_token_s: Price = 0.0023
    prefill_pair_s: Price = 0.00000086
    decode_request_s: Price = 0.0053
    context_token_s: Price = 0.000004
    handoff_local_s: Seconds = 0.0005
    handoff_token_s: Price = 0.00002

    def model(self) -> LinearCost:
        return LinearCost(**structs.asdict(self))


class FittedSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model: fitted`."""

    file: str = ""
    """A fit as `save_fitted` writes it, a step profile, a worker's step log, or the folder of them (`step_log`)."""
    fit: FittedCost | None = None
    """Instead of `file`: what was read there."""


AnySpec = RooflineSpec | TableSpec | SplitwiseSpec | LinearSpec | FittedSpec
SPECS: dict[str, type[AnySpec]] = {
    "linear": LinearSpec,
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
    """Build the cost model; files are relative to `folder`. Raises ConfigError with every problem."""
    match spec:
        case LinearSpec():
            return spec.model(), KindFacts()
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
    """A model is named by its `config.json`, not as the catalogue names it."""
    return llm.endswith(".json")


def read_model(llm: str | ModelShape, folder: Path) -> ModelShape:
    """Find a model: by its name, its `config.json`, or its sizes. Raises ConfigError."""
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
    """Both, or both problems at once."""
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
    parallel = Parallel(tp=spec.tp, pp=spec.pp, cp=spec.cp, dp=spec.dp, ep=spec.ep)
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
    """The draft's model, and everything that is wrong with the draft. Neither where there is no draft."""
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
    """What a worker is, beside how long it takes. `draft`: the model that drafts beside it."""
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
    """The facts are those of the same worker under the roofline: a table knows no memory."""
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
    """Vidur's measured layers; attention, exchange and head from the roofline."""
    curve = vidur_layer(llm=setting.llm, gpu=setting.hardware, tp=setting.tp)
    profile = engine_profile(spec.engine or "ideal", llm=setting.llm, gpu=hardware(setting.hardware), tp=setting.tp)
    parallel = Parallel(tp=spec.tp, pp=spec.pp)
    return RooflineCost(
        model=model_shape(setting.llm), hardware=hardware(setting.hardware), parallel=parallel, engine=profile,
        wire=setting.wire, measured_layer=curve,
    )  # fmt: skip
