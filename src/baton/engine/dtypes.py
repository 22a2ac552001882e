"""Which number type a model computes in. Importable without torch, so that the server can size the KV cache."""

from __future__ import annotations

from typing import Literal, get_args

from baton.core.errors import ConfigError
from baton.engine.card import ModelCard
from baton.kv.layout import KVDtype

ComputeDtype = Literal["float32", "bfloat16", "float16"]


def resolve_dtype(dtype: str, device: str = "cpu") -> ComputeDtype:
    """Turn `auto` into float32 on a CPU (exact, and as fast as bfloat16 without AMX) and bfloat16 on a GPU."""
    if dtype == "auto":
        return "bfloat16" if device.startswith("cuda") else "float32"
    for known in get_args(ComputeDtype):
        if dtype == known:
            return known
    raise ConfigError(f"unknown dtype {dtype!r}; use auto, {', '.join(get_args(ComputeDtype))}")


def resolve_kv_dtype(card: ModelCard, kv_dtype: str, dtype: ComputeDtype) -> KVDtype:
    """Turn `auto` into what the model computes in; the hash model writes bytes and nothing else."""
    if card.format == "hash":
        return "uint8"
    return dtype if kv_dtype == "auto" else resolve_dtype(kv_dtype)
