"""Compute the hidden states of a step: operation by operation, or by replaying a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from baton.compute.decode_sizes import BATCH_BUCKETS, batch_bucket, width_bucket
from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.flex import FlexBackend
from baton.compute.torch.kernels.paged_decode import DecodeKernel, DecodeTables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.attention import PlannedStep
from baton.compute.torch.layers.decoder import Decoder

WARM_UPS = 2
"""Runs before a capture, in which libraries select kernels and allocate memory. A capture must not contain this."""

_ALIGNED_NUMBERS = 4
"""Numbers of 4 bytes between 16-byte boundaries."""

Replay = Callable[[], tuple[Tensor, Tensor]]
"""Computes a step. Returns its hidden states [tokens, hidden] and logits [tokens, vocab]."""


class StepRunner(Protocol):
    """Computes the hidden states and the logits of steps."""

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        """Compute a step and write its KV. Return hidden states [tokens, hidden], valid until the next call."""
        ...

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        """Return the logits of some rows of the hidden states of the last step: [picked, vocab], float32."""
        ...

    def prepare(self) -> None:
        """Do the one-time work that would delay first steps. Writes nothing to the arena."""
        ...


@dataclass(frozen=True, slots=True)
class EagerRunner:
    """Implements `StepRunner`: launches every operation separately."""

    model: Decoder
    backend: AttentionBackend
    device: torch.device

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        return self.model.forward(torch.tensor(tokens, device=self.device), rows, kv, self.backend)

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        return self.model.logits(hidden[torch.tensor(picked, device=self.device)])

    def prepare(self) -> None:
        """Separate operations need no preparation."""


@dataclass(frozen=True, slots=True)
class FlexRunner:
    """Implements `StepRunner` with `flex_attention`, which torch compiles for the shape of an arena.

    Steps over another arena, as in the warm-up, use torch's own attention: each compilation takes some 10 s.
    """

    model: Decoder
    backend: FlexBackend
    kv: PagedKV
    device: torch.device

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        backend = self.backend if kv is self.kv else SdpaBackend()
        return EagerRunner(self.model, backend, self.device).hidden(tokens, rows, kv)

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        return EagerRunner(self.model, self.backend, self.device).logits(hidden, picked)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compile for the shapes of every later step."""
        self.backend.prepare(self.model.config.heads, self.kv)


class GraphCapture(Protocol):
    """Records a computation on fixed tensors, so that repeating it is cheap."""

    def capture(self, compute: Replay) -> Replay:
        """Return a function that repeats `compute`. May run `compute` a few times, so it must be repeatable."""
        ...


class CudaCapture:
    """Implements `GraphCapture` with CUDA graphs: one launch per step instead of hundreds.

    Source: CUDA programming guide, CUDA graphs.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # shared, because graphs do not run at the same time
        self._stream = torch.cuda.Stream()  # a single one: cuBLAS keeps a workspace (32 MiB on sm_90) for each stream

    def capture(self, compute: Replay) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            out = compute()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return out

        return replay


class NoCapture:
    """Implements `GraphCapture` without graphs, for tests on a CPU: runs the computation itself."""

    def capture(self, compute: Replay) -> Replay:
        return compute


class _GraphInputs:
    """The fixed tensors that one graph reads. All lie in one tensor, so that a step needs a single upload.

    Entries of the host's copy stay from step to step, and only those that changed are written. Each tensor begins at a
    multiple of 16 bytes: Triton compiles a kernel anew for pointers that do not.
    """

    def __init__(self, size: int, blocks: int, device: torch.device) -> None:
        stride = -(-size // _ALIGNED_NUMBERS) * _ALIGNED_NUMBERS
        numbers = 3 * stride + blocks * size
        self._host = torch.zeros(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(numbers, dtype=torch.int32, device=device)
        written = self._host.numpy()
        self._fields = written[: 3 * stride].reshape(3, stride)[:, :size]  # tokens, positions, lengths
        self._blocks = written[3 * stride :].reshape(size, blocks)
        self._held: list[Tensor | None] = [None] * size
        """The table of each row of `_blocks`. An equal object is an equal table."""
        fields = self._device[: 3 * stride].view(3, stride)[:, :size]
        self.tokens, self.positions, lengths = fields.unbind()  # [size] each
        self.tables = DecodeTables(self._device[3 * stride :].view(size, blocks), lengths)

    def fill(self, tokens: Sequence[int], rows: Sequence[Row]) -> None:
        """Upload the values of a step. The requests after its last one are padding, and have length 0."""
        count = len(rows)
        positions = [row.start for row in rows]
        self._fields[0, :count] = tokens
        self._fields[1, :count] = positions
        self._fields[2, :count] = positions
        self._fields[2, :count] += 1
        self._fields[2, count:] = 0
        for index, row in enumerate(rows):
            if self._held[index] is not row.blocks:
                self._held[index] = row.blocks
                self._blocks[index, : len(row.blocks)] = row.blocks.numpy()
        self._device.copy_(self._host, non_blocking=True)  # the engine waits for the step before it fills again


@dataclass(frozen=True, slots=True)
class _Graph:
    """One captured decode step."""

    inputs: _GraphInputs
    replay: Replay


@dataclass(slots=True)
class GraphRunner:
    """Implements `StepRunner`: replays steps of one token per request as graphs, and runs other steps by `eager`.

    `prepare` captures every graph before the first request. A graph always writes to the arena of its capture.
    """

    eager: EagerRunner
    kv: PagedKV
    kernel: DecodeKernel
    capture: GraphCapture
    context_tokens: int
    """The most tokens of a request, at most those of the model's context."""
    requests_max: int
    """The most requests of a step. Graphs for more are not captured, and a larger step runs by `eager`."""
    _graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    _last: tuple[Tensor, Tensor] | None = None
    """Hidden states and logits of the last replayed step, without its padding."""

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        size = batch_bucket(len(rows))
        if kv is not self.kv or size is None or size > self._size_max() or any(row.count > 1 for row in rows):
            return self.eager.hidden(tokens, rows, kv)
        graph = self._graph(size, self._width(max(len(row.blocks) for row in rows)))
        graph.inputs.fill(tokens, rows)
        hidden, logits = graph.replay()
        self._last = hidden[: len(rows)], logits[: len(rows)]
        return self._last[0]

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        if self._last is None or self._last[0] is not hidden:
            return self.eager.logits(hidden, picked)
        logits = self._last[1]
        return logits if len(picked) == len(logits) else logits[torch.tensor(picked, device=logits.device)]

    def prepare(self) -> None:
        """Capture every graph. Its requests are padding, so nothing is written to the arena."""
        sizes = [size for size in BATCH_BUCKETS if size <= self._size_max()]
        tokens = 1
        while tokens <= self.context_tokens:
            blocks = self._width(-(-tokens // self.kv.layout.block_tokens))
            for size in reversed(sizes):  # the largest one first: the others reuse its memory
                self._graph(size, blocks)
            tokens = blocks * self.kv.layout.block_tokens + 1

    def _graph(self, size: int, blocks: int) -> _Graph:
        if (size, blocks) not in self._graphs:
            inputs = _GraphInputs(size, blocks, self.eager.device)
            self._graphs[size, blocks] = _Graph(inputs, self.capture.capture(lambda: self._compute(inputs)))
        return self._graphs[size, blocks]

    def _compute(self, inputs: _GraphInputs) -> tuple[Tensor, Tensor]:
        model, tables = self.eager.model, inputs.tables
        slots = self.kv.decode_slots(inputs.positions, tables.blocks, tables.lengths)
        step = PlannedStep(inputs.positions, slots, self.kv, self.kernel.plan(tables, self.kv))
        hidden = model.compute(inputs.tokens, model.attention.begin_decode(step))
        return hidden, model.logits(hidden)

    def _size_max(self) -> int:
        """Return the batch size of the largest graph."""
        return batch_bucket(self.requests_max) or BATCH_BUCKETS[-1]

    def _width(self, blocks: int) -> int:
        """Return the number of blocks per request in the smallest graph that fits this many."""
        block_tokens = self.kv.layout.block_tokens
        return -(-width_bucket(blocks * block_tokens, self.context_tokens) // block_tokens)
