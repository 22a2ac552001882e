"""Choose precisions without torch: the server must know them before any worker starts."""

from __future__ import annotations

from typing import Literal

from baton.compute.models.card import ModelCard
from baton.core.config import DtypeChoice, KVDtypeChoice, WeightsChoice
from baton.decide.kv.layout import KVDtype

Dtype = Literal["float32", "bfloat16"]
WeightKind = Literal["dense", "int8", "q8", "q4", "q4m"]
"""int8: 8 bits and a scale per row. q8, q4: a scale per run of 32 inputs. q4m: and a minimum per run."""


def resolve_dtype(choice: DtypeChoice, device: str, weights: WeightsChoice = "dense") -> Dtype:
    """Say in which precision a model computes.

    `auto` is float32 on a CPU: there the text is that of transformers in float32, and of the torch engine where no
    native one can be built, which in bfloat16 differs in one greedy token of a hundred. bfloat16 takes about two thirds
    of the time. On a GPU it is bfloat16. Quantized weights are rounded more coarsely than that, so beside them it is
    bfloat16 everywhere.
    """
    if choice != "auto":
        return choice
    if weights != "dense":
        return "bfloat16"
    return "float32" if device == "cpu" else "bfloat16"


def kv_dtype(card: ModelCard, choice: KVDtypeChoice, dtype: Dtype) -> KVDtype:
    """Say in which precision the arena holds keys and values. The hash engine's are bytes, whatever was chosen."""
    if card.format == "hash":
        return "uint8"
    return dtype if choice == "auto" else choice
