"""How a step gets from tokens to hidden states: operation by operation, or replayed as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.paged_decode import DecodeKernel, DecodeTables, decode_tables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.layers.attention import PlannedStep, positions_of
from baton.compute.torch.layers.decoder import Decoder

BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Requests that a graph is captured for; a smaller batch is filled up with its first request."""
WIDTH_TOKENS_MIN = 1024
WIDTH_FACTOR = 4
"""Longest request that a graph is captured for: 1,024 tokens, 4,096, 16,384, ..."""
WARM_UPS = 2
"""Runs before a capture: libraries choose kernels and take memory in the first ones, which a graph may not hold."""

Replay = Callable[[], Tensor]


class StepRunner(Protocol):
    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        """Compute a step's tokens and write their KV. Returns [tokens, hidden], valid until the next call."""
        ...

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        """Project some rows of what `hidden` returned to the vocabulary: [picked, vocab], float32."""
        ...


@dataclass(frozen=True, slots=True)
class EagerRunner:
    """Launches every operation of every step by itself."""

    model: Decoder
    backend: AttentionBackend
    device: torch.device

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        """See `StepRunner.hidden`."""
        return self.model.forward(torch.tensor(tokens, device=self.device), rows, kv, self.backend)

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        """See `StepRunner.logits`."""
        return self.model.logits(hidden[torch.tensor(picked, device=self.device)])


class Capture(Protocol):
    """Turns a computation on tensors that stay where they are into something that is cheap to repeat."""

    def capture(self, compute: Replay) -> Replay: ...


class CudaCapture:
    """One launch per step instead of hundreds. Source: CUDA programming guide, CUDA graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # one for all graphs: no two of them run at a time

    def capture(self, compute: Replay) -> Replay:
        """See `Capture.capture`. Runs `compute` a few times: it must give the same when it is repeated."""
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
    """Where there are no graphs: the computation itself, on the same fixed tensors."""

    def capture(self, compute: Replay) -> Replay:
        """See `Capture.capture`."""
        return compute


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The fixed tensors that one graph reads."""

    tokens: Tensor  # [batch]
    step: PlannedStep
    tables: DecodeTables

    def fill(self, tokens: Tensor, rows: Sequence[Row]) -> None:
        """Put a step's numbers in."""
        kv, host = self.step.kv, torch.device("cpu")
        tables = decode_tables(rows, host)
        self.tokens.copy_(tokens)
        self.step.positions.copy_(positions_of(rows, host))
        self.step.slots.copy_(kv.slots(rows))
        self.tables.blocks[:, : tables.blocks.shape[1]].copy_(tables.blocks)
        self.tables.lengths.copy_(tables.lengths)


@dataclass(slots=True)
class GraphRunner:
    """Replays steps in which every request computes one token; leaves all others to `eager`.

    A graph is captured when its size comes for the first time. It writes into the arena that it was captured with.
    """

    eager: EagerRunner
    kv: PagedKV
    kernel: DecodeKernel
    capture: Capture
    _graphs: dict[tuple[int, int], tuple[_Bucket, Replay]] = field(default_factory=dict)

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        """See `StepRunner.hidden`."""
        if kv is not self.kv or len(rows) > BATCH_BUCKETS[-1] or any(row.count > 1 for row in rows):
            return self.eager.hidden(tokens, rows, kv)
        size = next(bucket for bucket in BATCH_BUCKETS if bucket >= len(rows))
        # The first request stands in for those that are missing: it writes the same numbers into the same slots.
        filled = [*rows, *[rows[0]] * (size - len(rows))]
        numbers = torch.tensor([*tokens, *[tokens[0]] * (size - len(rows))])
        blocks = self._width(max(len(row.blocks) for row in rows))
        if (size, blocks) not in self._graphs:
            bucket = self._bucket(size, blocks)
            bucket.fill(numbers, filled)
            self._graphs[size, blocks] = (bucket, self.capture.capture(lambda: self._compute(bucket)))
        bucket, replay = self._graphs[size, blocks]
        bucket.fill(numbers, filled)
        return replay()[: len(rows)]

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        """See `StepRunner.logits`."""
        return self.eager.logits(hidden, picked)

    def _compute(self, bucket: _Bucket) -> Tensor:
        model = self.eager.model
        return model.compute(bucket.tokens, model.attention.begin_decode(bucket.step))

    def _bucket(self, size: int, blocks: int) -> _Bucket:
        layout, device = self.kv.layout, self.eager.device
        tables = DecodeTables(
            blocks=torch.zeros((size, blocks), dtype=torch.int32, device=device),
            lengths=torch.ones(size, dtype=torch.int32, device=device),
        )
        whole = torch.zeros(size, dtype=torch.int64, device=device)
        slots = torch.zeros((layout.layers * layout.planes, size), dtype=torch.int64, device=device)
        step = PlannedStep(whole.clone(), slots, self.kv, self.kernel.plan(tables, self.kv))
        return _Bucket(whole, step, tables)

    def _width(self, blocks: int) -> int:
        """Return how many blocks the tables have that hold so many."""
        tokens = WIDTH_TOKENS_MIN
        while tokens < blocks * self.kv.layout.block_tokens:
            tokens *= WIDTH_FACTOR
        return tokens // self.kv.layout.block_tokens
