"""Cost models by name, from plain data: the `cost` of a cluster file, of a plan, of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.core.errors import ConfigError
from baton.core.names import did_you_mean
from baton.core.ports import CostModel
from baton.cost.linear import LinearCost


def load_cost(raw: Mapping[str, Any]) -> CostModel:
    """Build the model that `model` names from the other keys. Raises ConfigError with everything that is wrong."""
    name = str(raw.get("model", "linear"))
    build = MODELS.get(name)
    if build is None:
        raise ConfigError(f"unknown cost model {name!r}{did_you_mean(name, MODELS)}; known are {', '.join(MODELS)}")
    return build({key: value for key, value in raw.items() if key != "model"})


def _linear(raw: Mapping[str, Any]) -> CostModel:
    known = LinearCost.__dataclass_fields__
    problems = [f"unknown key {key}{did_you_mean(key, known)}" for key in raw if key not in known]
    problems += [
        f"{key} is {value!r}, but must be a number of seconds, 0 or more"
        for key, value in raw.items()
        if key in known and not (isinstance(value, int | float) and value >= 0)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return LinearCost(**{key: float(value) for key, value in raw.items()})


MODELS: dict[str, Callable[[Mapping[str, Any]], CostModel]] = {"linear": _linear}
"""By the name that `model` takes."""
