"""Choose precisions without torch: the server must know them before any worker starts."""

from __future__ import annotations

from typing import Literal

from baton.core.config import DtypeChoice, KVDtypeChoice
from baton.engine.card import ModelCard
from baton.kv.layout import KVDtype

Dtype = Literal["float32", "bfloat16"]


def resolve_dtype(choice: DtypeChoice, device: str) -> Dtype:
    """Say in which precision a model computes.

    `auto` is float32 on a CPU: there the batch that a request happens to share decides the order of sums, and in
    bfloat16 such a difference is large enough to change a greedy token now and then. On a GPU it is bfloat16.
    """
    if choice != "auto":
        return choice
    return "float32" if device == "cpu" else "bfloat16"


def kv_dtype(card: ModelCard, choice: KVDtypeChoice, dtype: Dtype) -> KVDtype:
    """Say in which precision the arena holds keys and values. The hash engine's are bytes, whatever was chosen."""
    if card.format == "hash":
        return "uint8"
    return dtype if choice == "auto" else choice
