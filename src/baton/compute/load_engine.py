"""Load the engine that a model needs. Only the torch engine imports torch, so the other engines start fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from baton.compute.attention_choice import FP8_REASON, TRITON_FORMS, fp8_weights_problem, torch_backend, triton_problem
from baton.compute.constrained import ConstrainedEngine
from baton.compute.decode_sizes import BATCH_BUCKETS
from baton.compute.hash_engine import HashEngine
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary
from baton.compute.native.load_native import Computation, load_native_engine, native_problem
from baton.compute.ranks.commands import RankCommandChannel
from baton.compute.ranks.place import rank_place
from baton.compute.step_engine import StepEngine
from baton.core.config import AttentionName, ParallelConfig, SandboxConfig, WeightsChoice
from baton.core.errors import ModelError
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import DeviceArray
from baton.move.compiling import NativeUnavailableError
from baton.move.weights_file import WeightsFile


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine that computes a model, and the reason for it."""

    kind: Literal["hash", "torch", "native"]
    reason: str = ""
    """torch: the reason why the native engine, which is faster, cannot be used. native: its instruction set."""
    library: Path | None = None
    """The compiled library of the native engine."""
    attention: str = ""
    """Name of the attention backend. Empty: the hash engine has none, and torch takes that of its device."""
    device: str = "cpu"
    weights: WeightsChoice = "dense"
    weights_file: WeightsFile | None = None
    """Shares packed weights with other processes. Only the native engine uses it."""
    guest_cores: Sequence[int] = ()
    """Cores of other workers, which the native engine uses while they are idle.

    This process must be pinned to exactly as many cores as it has threads.
    """
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Limits of the work on grammars."""
    spill: memoryview | None = None
    """Memory of the spill space. None: there is none."""
    requests_max: int = BATCH_BUCKETS[-1]
    """The most requests of a step. On a GPU, the torch engine prepares for no larger ones."""

    def __str__(self) -> str:
        backend = f", {self.attention} attention" if self.kind == "torch" and self.attention else ""
        return f"{self.kind} engine" + (f" ({self.reason})" if self.reason else "") + backend


def choose_engine(
    card: ModelCard,
    layout: KVLayout,
    *,
    device: str = "cpu",
    weights: WeightsChoice = "dense",
    attention: AttentionName = "auto",
) -> EngineChoice:
    """Return the native engine if it supports the model and can be built, else the torch engine.

    attention: `auto`, or the backend to use. All but `native` select torch.

    Builds the native library if it is not in the cache (seconds, once per machine). Raises ModelError if
    `attention` or quantized `weights` need the native engine, and it cannot be used.
    """
    if card.format == "hash":
        return EngineChoice(kind="hash")
    others = torch_backend("auto", device)
    if attention not in ("auto", "native"):
        problem = f"attention is {attention}"
    else:
        problem = FP8_REASON if weights == "fp8" else native_problem(card, layout, device)
    if not problem:
        try:
            library = NativeLibrary(library_path())
        except NativeUnavailableError as error:
            problem = str(error)
        else:
            found = EngineChoice(kind="native", reason=library.kernels, library=library.path, weights=weights)
            return replace(found, attention="native")
    if attention == "native":
        raise ModelError(f"--attention-backend native cannot be used: {problem}; use --attention-backend {others}")
    if weights == "fp8" and (refusal := fp8_weights_problem(card)):
        raise ModelError(refusal)
    if weights not in ("dense", "fp8"):
        raise ModelError(f"weights = {weights!r} needs the native engine: {problem}; use weights = 'dense'")
    reason = problem if attention == "auto" else ""
    if attention in TRITON_FORMS and (refusal := triton_problem(attention, device, layout)):
        raise ModelError(refusal)
    backend = torch_backend(attention, device)
    return EngineChoice(kind="torch", reason=reason, device=device, attention=backend, weights=weights)


class RankProcesses(RankCommandChannel, Protocol):
    """Controls the other rank processes of a parallel worker from its first rank."""

    def begin(self, port: int) -> None:
        """Tell all ranks to join the rendezvous on this loopback port, and to load their part of the model."""
        ...

    def wait_ready(self) -> None:
        """Wait until all ranks have loaded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComputation:
    """The computation of the first rank."""

    dtype: Dtype
    threads: int
    parallel: ParallelConfig


def load_parallel_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview | DeviceArray,
    others: RankProcesses,
    computed: RankComputation,
) -> StepEngine:
    """Load the first rank's part of a model, and return the engine of all ranks. It does not apply grammars.

    memory: on a CPU the worker's arena, on a GPU this rank's.
    Raises ModelError where the ranks cannot compute the model.
    """
    from baton.compute.ranks.load_rank import RankArena, leader_engine, load_rank
    from baton.compute.ranks.process_groups import connect_ranks, host_rendezvous

    place = rank_place(layout, 0, experts=computed.parallel.experts)
    rendezvous, arena = host_rendezvous(), RankArena.of(memory, layout, place)
    others.begin(rendezvous.port)
    collectives = connect_ranks(place, rendezvous, arena.device)
    own = load_rank(card, layout, arena, collectives, dtype=computed.dtype, threads=computed.threads)
    others.wait_ready()
    return leader_engine(own, layout, others, computed.parallel.overlap_tokens_min)


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

    memory: the whole arena, writable, on the device of the choice. dtype: the type to compute in; `layout.dtype` is
    the type of the stored KV. threads: CPU threads of this process. choice: None takes the result of `choose_engine`.
    Raises ModelError for weights that cannot be read.
    """
    chosen = choice or choose_engine(card, layout)
    inner: StepEngine
    if chosen.kind == "hash":
        inner = HashEngine(layout, _on_host(memory), card.vocab_tokens, card.window_tokens, card.path)
        if chosen.spill is not None:
            inner.use_spill(chosen.spill)
        return ConstrainedEngine(inner, card, chosen.sandbox)
    if chosen.library is None:
        from baton.compute.torch.load_torch import TorchComputation, load_torch_engine

        computed = TorchComputation(
            dtype=dtype,
            threads=threads,
            device=chosen.device,
            attention=chosen.attention,
            weights=chosen.weights,
            spill=chosen.spill,
            requests_max=chosen.requests_max,
        )
        inner = load_torch_engine(card, layout, memory, computed)
    else:
        computation = Computation(threads=threads, dtype=dtype, weights=chosen.weights, file=chosen.weights_file)
        native = load_native_engine(card, layout, _on_host(memory), NativeLibrary(chosen.library), computation)
        native.add_guests(chosen.guest_cores)
        if chosen.spill is not None:
            native.use_spill(chosen.spill)
        inner = native
    return ConstrainedEngine(inner, card, chosen.sandbox)


def _on_host(memory: memoryview | DeviceArray) -> memoryview:
    if isinstance(memory, DeviceArray):
        raise ModelError("this engine computes on the CPU, and its KV cache is on a GPU; use --device cpu")
    return memory
