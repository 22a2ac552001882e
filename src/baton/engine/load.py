"""Make the engine that a model needs."""

from __future__ import annotations

from typing import Literal

from baton.engine.card import ModelCard
from baton.engine.hash_engine import HashEngine
from baton.engine.port import StepEngine
from baton.kv.layout import KVLayout


def load_engine(  # noqa: PLR0913  the one place where an engine is made
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview,
    *,
    dtype: Literal["float32", "bfloat16"],
    threads: int,
    device: Literal["cpu", "cuda"] = "cpu",
) -> StepEngine:
    """Load weights and return an engine over the arena's `memory`. Raises ModelError for a model that cannot be."""
    if card.format == "hash":
        return HashEngine(layout, memory, card.vocab_tokens)
    from baton.engine.torch_engine import load_torch_engine  # torch takes seconds to import: only where it is used

    return load_torch_engine(card, layout, memory, dtype=dtype, threads=threads, device=device)
