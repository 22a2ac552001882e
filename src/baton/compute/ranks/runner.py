"""Run the steps of a parallel worker: the first rank sends commands, all ranks compute their part, the first samples.

Stages do not overlap: a stage waits while the others compute. The ranks of a stage may run a step as two micro-batches,
and exchange the results of one while they compute the other. With data parallelism, each rank computes some requests of
a step: all ranks read the same arena, so a request may be on another rank in its next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from baton.compute.ranks.commands import Forward, ForwardSlice, Project, RankCommand, RankCommandChannel
from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.paged_kv import PagedKV, Row, scratch_block
from baton.compute.torch.layers.attention import IdlePass
from baton.compute.torch.layers.collectives import Collectives
from baton.compute.torch.layers.decoder import Decoder


@dataclass(frozen=True, slots=True)
class RankModel:
    """One rank's part of a model, bound to its part of the KV blocks."""

    model: Decoder
    kv: PagedKV
    backend: AttentionBackend
    collectives: Collectives
    dtype: torch.dtype
    device: torch.device

    def forward(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV, ahead: int = 0) -> Tensor:
        """Compute this rank's part of a step, and return hidden states [tokens, hidden].

        ahead: tokens of the first of two micro-batches. 0: the step is one batch.
        On the first stage they are those after the model's last layer, on other stages after the stage's last layer.
        """
        place = self.collectives.place
        if place.first_stage:
            hidden = self.model.embed(torch.tensor(tokens, device=self.device))
        else:
            hidden = torch.empty(len(tokens), self.model.config.hidden, dtype=self.dtype, device=self.device)
        if not place.data:
            return self._run(hidden, rows, kv, ahead)
        parts = divide_requests(rows, place.tensor)
        own, places = parts[place.column], [_tokens_of(part).to(self.device) for part in parts]
        computed = self._run(hidden[places[place.column]], _placed(own), kv)
        return self._joined(computed, places) if place.first_stage else computed

    def _run(self, hidden: Tensor, rows: Sequence[Row], kv: PagedKV, ahead: int = 0) -> Tensor:
        """Run embeddings [tokens, hidden] through all stages. On other stages, `hidden` takes what is received."""
        ranks, begin = self.collectives, self.model.attention.begin
        if not ranks.place.first_stage and rows:
            ranks.receive_from_previous(hidden)
        if ahead:
            parts = divide_rows(rows, ahead, kv.part.block_tokens)
            first, second = (begin(part, kv, self.backend) for part in parts)
            hidden = torch.cat(self.model.run_micro_batches([(hidden[:ahead], first), (hidden[ahead:], second)]))
        else:
            hidden = self.model.run_layers(hidden, begin(rows, kv, self.backend) if rows else IdlePass())
        if ranks.place.pipeline > 1 and rows:
            ranks.send_to_next(hidden)
            if ranks.place.first_stage:
                hidden = torch.empty_like(hidden)
                ranks.receive_from_previous(hidden)
        return hidden

    def _joined(self, computed: Tensor, places: Sequence[Tensor]) -> Tensor:
        """Return the hidden states of all ranks' tokens, in the order of the step. places: where each rank has them."""
        each = max(len(part) for part in places)
        padded = computed.new_zeros(each, computed.shape[1])
        padded[: len(computed)] = computed
        joined = computed.new_empty(sum(len(part) for part in places), computed.shape[1])
        for part, rows in zip(places, self.collectives.all_gather(padded).split(each), strict=True):
            joined[part] = rows[: len(part)]
        return joined

    def project(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        """Compute this rank's part of the logits of some rows. The first rank returns [picked, vocab]."""
        return self.model.logits(hidden[torch.tensor(picked, dtype=torch.int64, device=self.device)])


@dataclass(frozen=True, slots=True)
class LeaderRunner:
    """Implements `StepRunner` on the first rank: commands the other ranks to compute the same step."""

    own: RankModel
    channel: RankCommandChannel
    overlap_tokens_min: int = 0
    """Tokens of a step from which it runs as two micro-batches. 0: never."""

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        with _exit_on_error():
            slices = [ForwardSlice(row.count, row.start, row.blocks.tolist()) for row in rows]
            overlaps = self.overlap_tokens_min and len(tokens) >= max(2, self.overlap_tokens_min)
            ahead = len(tokens) // 2 if overlaps and self.own.collectives.place.tensor > 1 else 0
            self.channel.send(Forward(list(tokens), slices, ahead, kv is not self.own.kv))
            return self.own.forward(tokens, rows, kv, ahead)

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        with _exit_on_error():
            if self.own.collectives.place.tensor > 1:
                self.channel.send(Project(list(picked)))
            return self.own.project(hidden, picked)

    def prepare(self) -> None:
        """Ranks run no graphs."""


class FollowerRank:
    """Executes the commands of the first rank on another rank."""

    def __init__(self, own: RankModel) -> None:
        self._own = own
        self._scratch = scratch_block(own.kv)
        self._hidden = torch.empty(0)

    @torch.inference_mode()
    def execute(self, command: RankCommand) -> None:
        """Compute this rank's part of a command, and return when it is done."""
        match command:
            case Forward(tokens=tokens):
                kv = self._scratch if command.scratch else self._own.kv
                self._hidden = self._own.forward(tokens, _rows(command.slices), kv, command.ahead)
            case Project(picked=picked):
                if self._own.collectives.place.first_stage:
                    self._own.project(self._hidden, picked)


def divide_requests(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Divide a batch among ranks, so that they have about as many tokens, and as much context. All ranks agree."""
    parts: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [(0, 0)] * ranks  # tokens, and keys that they see
    for row in sorted(rows, key=lambda row: (-row.count, -row.total)):
        rank = loads.index(min(loads))
        parts[rank].append(row)
        loads[rank] = loads[rank][0] + row.count, loads[rank][1] + row.count * row.total
    return parts


def _tokens_of(rows: Sequence[Row]) -> Tensor:
    """Return the tokens of rows in the step: [tokens]."""
    return torch.tensor([token for row in rows for token in range(row.first, row.first + row.count)], dtype=torch.int64)


def _placed(rows: Sequence[Row]) -> list[Row]:
    """Place rows one after the other in a batch of their own."""
    firsts = accumulate((row.count for row in rows), initial=0)
    return [Row(first, row.count, row.start, row.blocks) for first, row in zip(firsts, rows, strict=False)]


def divide_rows(rows: Sequence[Row], ahead: int, block_tokens: int) -> tuple[list[Row], list[Row]]:
    """Divide a batch after its first `ahead` tokens, within a slice if necessary.

    The second part of a slice reads the KV of the first, which each layer writes before.
    """
    first: list[Row] = []
    second: list[Row] = []
    for row in rows:
        count = min(max(0, ahead - row.first), row.count)
        if count:
            blocks = row.blocks[: -(-(row.start + count) // block_tokens)]
            first.append(Row(row.first, count, row.start, blocks))
        if count < row.count:
            second.append(Row(row.first + count - ahead, row.count - count, row.start + count, row.blocks))
    return first, second


def _rows(slices: Sequence[ForwardSlice]) -> list[Row]:
    """Place the slices one after the other in the batch."""
    rows: list[Row] = []
    first = 0
    for part in slices:
        rows.append(Row(first, part.count, part.start, torch.tensor(part.blocks, dtype=torch.int64)))
        first += part.count
    return rows


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """End the process after any error, because the other ranks now wait in a step that this rank has left.

    It raises SystemExit, which the code that retries failed requests does not catch. The server then starts a new
    worker.
    """
    try:
        yield
    except Exception as error:
        raise SystemExit(f"ranks are out of step, the worker ends: {type(error).__name__}: {error}") from error
