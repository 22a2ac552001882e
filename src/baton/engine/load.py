"""Make the engine that a model card asks for. Torch is imported only if needed: the hash engine starts at once."""

from __future__ import annotations

from typing import Protocol

from baton.core.step import Step, StepResult
from baton.core.types import BlockId
from baton.engine.card import ModelCard
from baton.engine.dtypes import ComputeDtype
from baton.engine.hash_engine import HashEngine
from baton.kv.layout import KVLayout


class LoadedEngine(Protocol):
    """A StepEngine that can be warmed up."""

    layout: KVLayout

    def execute(self, step: Step) -> StepResult: ...

    def warm_up(self, block: BlockId) -> None:
        """Touch weights and code paths once. Writes into `block`, which nobody may hold."""
        ...


def load_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview,
    *,
    dtype: ComputeDtype = "float32",
    threads: int = 1,
    device: str = "cpu",
) -> LoadedEngine:
    """Load a model's weights and bind them to an arena.

    memory: the whole arena, writable. dtype: what is computed in; `layout.dtype` is what is stored.
    threads: CPU threads of this process, set for all of torch. Raises ModelError for weights that cannot be read.
    """
    if card.format == "hash":
        return HashEngine(layout, memory, card.vocab_tokens)
    from baton.engine.load_torch import load_torch_engine

    return load_torch_engine(card, layout, memory, dtype=dtype, threads=threads, device=device)
