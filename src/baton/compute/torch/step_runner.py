"""Compute the hidden states of a step: operation by operation, or by replaying a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from baton.compute.decode_sizes import batch_bucket, width_bucket
from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.paged_decode import DecodeKernel, DecodeTables, decode_tables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.layers.attention import PlannedStep, positions_of
from baton.compute.torch.layers.decoder import Decoder

WARM_UPS = 2
"""Runs before a capture, in which libraries select kernels and allocate memory. A capture must not contain this."""

Replay = Callable[[], Tensor]


class StepRunner(Protocol):
    """Computes the hidden states and the logits of steps."""

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        """Compute a step and write its KV. Return hidden states [tokens, hidden], valid until the next call."""
        ...

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        """Return the logits of some rows of the hidden states: [picked, vocab], float32."""
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

    def capture(self, compute: Replay) -> Replay:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class NoCapture:
    """Implements `GraphCapture` without graphs, for tests on a CPU: runs the computation itself."""

    def capture(self, compute: Replay) -> Replay:
        return compute


@dataclass(frozen=True, slots=True)
class _GraphInputs:
    """The fixed tensors that one graph reads."""

    tokens: Tensor  # [batch]
    step: PlannedStep
    tables: DecodeTables

    def fill(self, tokens: Tensor, rows: Sequence[Row]) -> None:
        """Copy the values of a step into the tensors."""
        kv, host = self.step.kv, torch.device("cpu")
        tables = decode_tables(rows, host)
        self.tokens.copy_(tokens)
        self.step.positions.copy_(positions_of(rows, host))
        self.step.slots.copy_(kv.slots(rows))
        self.tables.blocks[:, : tables.blocks.shape[1]].copy_(tables.blocks)
        self.tables.lengths.copy_(tables.lengths)


@dataclass(slots=True)
class GraphRunner:
    """Implements `StepRunner`: replays steps of one token per request as graphs, and runs other steps by `eager`.

    A graph is captured when its size occurs for the first time. It always writes to the arena of its capture.
    """

    eager: EagerRunner
    kv: PagedKV
    kernel: DecodeKernel
    capture: GraphCapture
    _graphs: dict[tuple[int, int], tuple[_GraphInputs, Replay]] = field(default_factory=dict)

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        size = batch_bucket(len(rows))
        if kv is not self.kv or size is None or any(row.count > 1 for row in rows):
            return self.eager.hidden(tokens, rows, kv)
        # Copies of the first request pad the batch: they write the same numbers to the same slots.
        padded = [*rows, *[rows[0]] * (size - len(rows))]
        padded_tokens = torch.tensor([*tokens, *[tokens[0]] * (size - len(rows))])
        blocks = self._width(max(len(row.blocks) for row in rows))
        if (size, blocks) not in self._graphs:
            inputs = self._inputs(size, blocks)
            inputs.fill(padded_tokens, padded)
            self._graphs[size, blocks] = (inputs, self.capture.capture(lambda: self._compute(inputs)))
        inputs, replay = self._graphs[size, blocks]
        inputs.fill(padded_tokens, padded)
        return replay()[: len(rows)]

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        return self.eager.logits(hidden, picked)

    def _compute(self, inputs: _GraphInputs) -> Tensor:
        model = self.eager.model
        return model.compute(inputs.tokens, model.attention.begin_decode(inputs.step))

    def _inputs(self, size: int, blocks: int) -> _GraphInputs:
        layout, device = self.kv.layout, self.eager.device
        tables = DecodeTables(
            blocks=torch.zeros((size, blocks), dtype=torch.int32, device=device),
            lengths=torch.ones(size, dtype=torch.int32, device=device),
        )
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        slots = torch.zeros((layout.layers * layout.planes, size), dtype=torch.int64, device=device)
        step = PlannedStep(zeros.clone(), slots, self.kv, self.kernel.plan(tables, self.kv))
        return _GraphInputs(zeros, step, tables)

    def _width(self, blocks: int) -> int:
        """Return the number of blocks per request in the smallest graph that fits this many."""
        block_tokens = self.kv.layout.block_tokens
        return -(-width_bucket(blocks * block_tokens, self.eager.model.config.context_tokens) // block_tokens)
