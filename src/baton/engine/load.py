"""Make the engine that a model card asks for. Torch is imported only if needed: the hash engine starts at once."""

from __future__ import annotations

from baton.engine.card import ModelCard
from baton.engine.constrained import ConstrainedEngine
from baton.engine.dtype import Dtype
from baton.engine.hash_engine import HashEngine
from baton.engine.port import StepEngine
from baton.kv.layout import KVLayout


def load_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview,
    *,
    dtype: Dtype = "float32",
    threads: int = 1,
    device: str = "cpu",
) -> StepEngine:
    """Load a model's weights and bind them to an arena.

    memory: the whole arena, writable. dtype: what is computed in; `layout.dtype` is what is stored.
    threads: CPU threads of this process, set for all of torch. Raises ModelError for weights that cannot be read.
    """
    inner: StepEngine
    if card.format == "hash":
        inner = HashEngine(layout, memory, card.vocab_tokens)
    else:
        from baton.engine.load_torch import load_torch_engine

        inner = load_torch_engine(card, layout, memory, dtype=dtype, threads=threads, device=device)
    return ConstrainedEngine(inner, card)
