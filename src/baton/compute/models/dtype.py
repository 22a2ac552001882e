"""Choose the precision of a model and of its KV cache. No torch: the server chooses before a worker starts."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.compute.models.card import ModelCard
from baton.core.config import Config, DtypeChoice, PhaseConfig, WeightsChoice
from baton.core.kv_config import KVDtypeChoice
from baton.decide.kv.layout import KVDtype

Dtype = Literal["float32", "bfloat16"]
WeightKind = Literal["dense", "int8", "q8", "q4", "q4m"]
"""Format of weights in memory.

dense: floats. int8: 8 bits and a scale per row. q8, q4: 8 or 4 bits and a scale per 32 inputs. q4m: q4 and a minimum
per 32 inputs.
"""


FP8_WIDTH = 16
"""A matrix is held in fp8 if both of its sizes are multiples of this, as tensor cores require."""


class Precision(Struct, frozen=True):
    """Types that one worker computes in."""

    dtype: Dtype
    weights: WeightsChoice


def phase_precisions(config: Config, device: str) -> dict[str, Precision]:
    """Return the precision of workers by the role that they start in. Empty: all workers have the same.

    `device`: `cpu` or `cuda`.
    """
    phases = {"prefill": config.prefill, "decode": config.decode, "mixed": PhaseConfig()}
    if all(phase == PhaseConfig() for phase in phases.values()):
        return {}
    found: dict[str, Precision] = {}
    for role, phase in phases.items():
        weights = config.weights if phase.weights is None else phase.weights
        choice = config.dtype if phase.dtype is None else phase.dtype
        found[role] = Precision(resolve_dtype(choice, device, weights), weights)
    return found


def resolve_dtype(choice: DtypeChoice, device: str, weights: WeightsChoice = "dense") -> Dtype:
    """Return the precision that a model computes in.

    `auto` is float32 on a CPU, so that the text equals that of transformers and of the torch engine. In bfloat16, a
    step takes about two thirds of the time, but one greedy token in a hundred differs between engines. `auto` is
    bfloat16 on a GPU, and for quantized weights, which are rounded more coarsely than bfloat16.
    """
    if choice != "auto":
        return choice
    if weights != "dense":
        return "bfloat16"
    return "float32" if device == "cpu" else "bfloat16"


def kv_dtype(card: ModelCard, choice: KVDtypeChoice, dtype: Dtype) -> KVDtype:
    """Return the type of keys and values in the arena. The hash engine always stores bytes."""
    if card.format == "hash":
        return "uint8"
    return dtype if choice == "auto" else choice
