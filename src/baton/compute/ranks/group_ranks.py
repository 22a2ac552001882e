"""Ranks that talk over groups of torch.distributed: gloo's between CPUs (`gloo.py`), NCCL's between GPUs (`nccl.py`).

The groups are made for one worker and held by nobody else: there is no process-wide state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import GatherOptions, Work

from baton.compute.ranks.place import RankPlace

ANSWER_S = 300.0
"""Longest wait for another rank. The server kills a worker that is silent for `survival.silent_s`, which is sooner as
it is set by default; this bounds the rest."""


class Group(Protocol):
    """What we use of torch's process groups."""

    def allreduce(self, tensor: Tensor, /) -> Work: ...

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: GatherOptions, /
    ) -> Work: ...

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int, /) -> Work: ...


class GroupRanks:
    """Implements `Ranks`."""

    def __init__(self, place: RankPlace, stage: Group, column: Group) -> None:
        """stage: the ranks of our stage, by their column. column: those of our column, by their stage."""
        self.place = place
        self._stage = stage
        self._stages = column

    def summed(self, partial: Tensor) -> Tensor:
        """See `Ranks`."""
        if self.place.tensor > 1:
            partial = partial.contiguous()
            self._stage.allreduce(partial).wait()
        return partial

    def joined(self, columns: Tensor) -> Tensor | None:
        """See `Ranks`."""
        options = GatherOptions()
        options.rootRank = 0
        first = self.place.column == 0
        parts = [torch.empty_like(columns) for _ in range(self.place.tensor)] if first else []
        self._stage.gather([parts] if first else [], [columns.contiguous()], options).wait()
        return torch.cat(parts, 1) if first else None

    def pass_on(self, hidden: Tensor) -> None:
        """See `Ranks`. Waits until it is sent, which does not take the other's receiving; on a GPU its stream does."""
        self._stages.send([hidden.contiguous()], (self.place.stage + 1) % self.place.pipeline, 0).wait()

    def receive(self, hidden: Tensor) -> None:
        """See `Ranks`."""
        self._stages.recv([hidden], (self.place.stage - 1) % self.place.pipeline, 0).wait()
