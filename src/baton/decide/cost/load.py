"""Build a cost model from plain data: the `cost` section of a configuration or cluster file.

    {model: roofline, llm: llama2-70b, hardware: A100-80G-SXM, tp: 8, engine: splitwise-vllm}
    {llm: llama2-70b, kinds: {a100: {model: roofline, hardware: A100-80G-SXM, tp: 8}, h100: {...}}}

With `kinds`, the keys beside it are defaults for every kind, and the kind of a worker selects its model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from baton.core.errors import ConfigError
from baton.core.files import placed
from baton.core.ports import CostModel
from baton.core.types import StepShape
from baton.core.validation import did_you_mean, out_of_range, type_problems
from baton.decide.cost.fitted import read_fitted
from baton.decide.cost.spec import SPECS, Built, KindFacts, build, is_model_file, read_model


@dataclass(frozen=True, slots=True, kw_only=True)
class HeterogeneousCost:
    """One cost model per kind of worker.

    Predictions without a kind use the first one; a handoff between unknown workers uses the slowest link.
    """

    kinds: Mapping[str, CostModel]
    """By `WorkerView.kind`. At least one."""

    @property
    def _first(self) -> CostModel:
        return next(iter(self.kinds.values()))

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        return self._first.prefill_s(new_tokens=new_tokens, cached_tokens=cached_tokens)

    def step_s(self, shape: StepShape) -> float:
        return self._first.step_s(shape)

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        return self._first.decode_run_s(requests=requests, context_tokens=context_tokens, steps=steps)

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        return max(cost.handoff_s(tokens=tokens, same_host=same_host) for cost in self.kinds.values())

    def on(self, kind: str) -> CostModel:
        return self.kinds.get(kind, self._first)


_REMOVED_KEYS = {
    "local_wire": "workers of one host share its arena and copy nothing; for GPUs that do copy to each other, give "
    "each worker a host of its own, and say how fast in `wire`",
}
"""Keys of earlier versions, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCost:
    """A cost model with the properties of each kind of worker."""

    cost: CostModel
    kinds: Mapping[str, KindFacts]
    """By kind. A section without `kinds` has one kind, with an empty name."""


def inline_files(raw: Mapping[str, Any], *, folder: Path) -> dict[str, Any]:
    """Return a section in which files (fits and model sizes) are replaced by their content.

    Workers, joining hosts and replays use the section later or elsewhere, where the files may differ or be missing
    (INV-7). Raise ConfigError for an invalid file; `load_cost` validates the rest.
    """
    kinds = raw.get("kinds")
    if not isinstance(kinds, Mapping):
        return _inline_kind(raw, folder, "cost")
    shared = {key: value for key, value in raw.items() if key != "kinds"}
    sections: dict[str, Any] = {}
    for name, section in cast("Mapping[str, Any]", kinds).items():
        own = cast("Mapping[str, Any]", section)
        is_section = isinstance(section, Mapping)
        sections[name] = _inline_kind({**shared, **own}, folder, f"cost.kinds.{name}") if is_section else section
    return {"kinds": sections}


def _inline_kind(section: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    found, llm, file = dict(section), section.get("llm"), section.get("file")
    try:
        if isinstance(llm, str) and is_model_file(llm):
            found["llm"] = msgspec.to_builtins(read_model(llm, folder))
        if section.get("model") == "fitted" and isinstance(file, str) and file and "fit" not in section:
            found["fit"] = msgspec.to_builtins(read_fitted(folder / file))
            del found["file"]
    except ConfigError as error:
        raise ConfigError("\n".join(placed(where, error))) from error
    return found


def load_cost(raw: Mapping[str, Any], *, folder: Path, where: str = "cost") -> LoadedCost:
    """Build the cost model that a section describes. Files are relative to `folder`; `where` is the section's name.

    Raise ConfigError with every problem of every kind, one per line: unknown keys, models, GPUs and engines with the
    nearest known ones, parallel degrees that do not divide the model, and models that do not fit, with alternatives.
    """
    if "kinds" not in raw:
        cost, facts = _load_kind(dict(raw), folder, where)
        return LoadedCost(cost=cost, kinds={"": facts})
    kinds = raw["kinds"]
    if not isinstance(kinds, Mapping) or not kinds:
        raise ConfigError(f"{where}.kinds must name at least one kind of worker, each with its own section")
    shared = {key: value for key, value in raw.items() if key != "kinds"}
    loaded: dict[str, Built] = {}
    problems: list[str] = []
    for name, section in cast("Mapping[str, Any]", kinds).items():
        if not isinstance(section, Mapping):
            problems.append(f"{where}.kinds.{name} must be a section of its own, but is {section!r}")
            continue
        try:
            own = cast("Mapping[str, Any]", section)
            loaded[name] = _load_kind({**shared, **own}, folder, f"{where}.kinds.{name}")
        except ConfigError as error:
            problems += str(error).splitlines()
    if problems:
        raise ConfigError("\n".join(problems))
    cost = HeterogeneousCost(kinds={name: cost for name, (cost, _) in loaded.items()})
    return LoadedCost(cost=cost, kinds={name: facts for name, (_, facts) in loaded.items()})


def _load_kind(raw: dict[str, Any], folder: Path, where: str) -> Built:
    model = raw.pop("model", "linear")
    if model not in SPECS:
        raise ConfigError(f"{where}.model is {model!r}{did_you_mean(str(model), SPECS)}; known: {', '.join(SPECS)}")
    kind = SPECS[model]
    problems = [f"{where}.{key} was removed: {_REMOVED_KEYS[key]}" for key in raw if key in _REMOVED_KEYS]
    section = {key: value for key, value in raw.items() if key not in _REMOVED_KEYS}
    problems += type_problems(section, kind, where)
    known = {key: value for key, value in section.items() if key in kind.__struct_fields__}
    if type_problems(known, kind):
        raise ConfigError("\n".join(problems))
    spec = msgspec.convert(known, kind)
    wrong = out_of_range(spec, where)
    if wrong:
        raise ConfigError("\n".join([*problems, *wrong]))  # nothing can be built from invalid numbers
    try:
        built = build(spec, folder)
    except ConfigError as error:
        raise ConfigError("\n".join([*problems, *placed(where, error)])) from error
    if problems:
        raise ConfigError("\n".join(problems))
    return built
