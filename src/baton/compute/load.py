"""Make the engine that a model card asks for. Torch is imported by the torch engine alone: the others start at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from baton.compute.constrained import ConstrainedEngine
from baton.compute.hash_engine import HashEngine
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary
from baton.compute.native.load import load_native_engine, load_quantized_engine, native_refusal
from baton.compute.port import StepEngine
from baton.compute.ranks.orders import Orders
from baton.compute.ranks.place import rank_place
from baton.core.config import WeightsChoice
from baton.core.errors import ModelError
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import DeviceArray
from baton.move.compiling import NativeUnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Which engine computes a model, and why."""

    kind: Literal["hash", "torch", "native"]
    reason: str = ""
    """Of torch: why not the faster one. Of the native engine: its instruction set."""
    library: Path | None = None
    """The compiled library of the native engine."""
    device: str = "cpu"
    weights: WeightsChoice = "dense"
    guest_cores: Sequence[int] = ()
    """Cores of other workers, which the native engine uses while they sleep: only where this process is pinned to as
    many cores as it has threads."""

    def __str__(self) -> str:
        return f"{self.kind} engine" + (f" ({self.reason})" if self.reason else "")


def choose_engine(
    card: ModelCard, layout: KVLayout, *, device: str = "cpu", weights: WeightsChoice = "dense"
) -> EngineChoice:
    """Take the native engine where it serves the model and can be built; else torch, which serves everything.

    Builds the library where it is not cached yet (seconds, once per machine). Raises ModelError where only the torch
    engine can serve, and quantized weights are asked for: it has none.
    """
    if card.format == "hash":
        return EngineChoice(kind="hash")
    refusal = native_refusal(card, layout, device)
    if not refusal:
        try:
            library = NativeLibrary(library_path())
            return EngineChoice(kind="native", reason=library.kernels, library=library.path, weights=weights)
        except NativeUnavailableError as error:
            refusal = str(error)
    if weights != "dense":
        raise ModelError(f"weights = {weights!r} needs the native engine: {refusal}; use weights = 'dense'")
    return EngineChoice(kind="torch", reason=refusal, device=device)


class Crew(Orders, Protocol):
    """The other ranks of a parallel worker, as its first rank holds them."""

    def begin(self, port: int) -> None:
        """Tell them where all ranks meet on loopback, and so to load."""
        ...

    def wait_ready(self) -> None:
        """Return when all of them have loaded."""
        ...


def load_parallel_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview | DeviceArray,
    crew: Crew,
    *,
    dtype: Dtype,
    threads: int,
) -> StepEngine:
    """Load the first rank's part of a model, and make one engine of it and the others'. See `load_engine`.

    memory: the worker's arena, on a GPU this rank's. threads: CPU threads of this rank.
    """
    from baton.compute.ranks.load import RankArena, load_lead, load_rank
    from baton.compute.ranks.meeting import host_meeting, meet

    meeting, arena = host_meeting(), RankArena.of(memory, layout, 0)
    crew.begin(meeting.port)
    ranks = meet(rank_place(layout, 0), meeting, arena.device)
    parts = load_rank(card, layout, arena, ranks, dtype=dtype, threads=threads)
    crew.wait_ready()
    return ConstrainedEngine(load_lead(parts, layout, crew), card)


def load_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview | DeviceArray,
    *,
    dtype: Dtype = "float32",
    threads: int = 1,
    choice: EngineChoice | None = None,
) -> StepEngine:
    """Load a model's weights and bind them to an arena.

    memory: the whole arena, writable, on the device of the choice. dtype: what is computed in; `layout.dtype` is what
    is stored.
    threads: CPU threads of this process. choice: which engine; None takes what `choose_engine` takes.
    Raises ModelError for weights that cannot be read.
    """
    chosen = choice or choose_engine(card, layout)
    inner: StepEngine
    if chosen.kind == "hash":
        return ConstrainedEngine(HashEngine(layout, _on_host(memory), card.vocab_tokens, card.window_tokens), card)
    if chosen.library is None:
        from baton.compute.torch.load import load_torch_engine

        inner = load_torch_engine(card, layout, memory, dtype=dtype, threads=threads, device=chosen.device)
    else:
        library, held = NativeLibrary(chosen.library), _on_host(memory)
        if chosen.weights != "dense":
            native = load_quantized_engine(card, layout, held, library, weights=chosen.weights, threads=threads)
        else:
            native = load_native_engine(card, layout, held, library, dtype=dtype, threads=threads)
        native.invite(chosen.guest_cores)
        inner = native
    return ConstrainedEngine(inner, card)


def _on_host(memory: memoryview | DeviceArray) -> memoryview:
    if isinstance(memory, DeviceArray):
        raise ModelError("this engine computes on the CPU, and its KV cache is on a GPU; use --device cpu")
    return memory
