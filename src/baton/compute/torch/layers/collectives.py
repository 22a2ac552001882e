"""The exchange of tensors between the ranks of a parallel worker, as the forward pass uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.compute.ranks.place import RankPlace


class PendingSum(Protocol):
    """A sum over ranks that has begun."""

    def wait(self) -> Tensor:
        """Wait until the sum is there (on a GPU: until its stream is ordered behind it), and return it."""
        ...


class Collectives(Protocol):
    """Exchanges tensors with the other ranks. All ranks of a call make it in the same order, and wait for each other.

    A stage is the ranks that share layers (tensor parallelism); stages follow each other (pipeline parallelism).
    """

    place: RankPlace

    def begin_sum(self, partial: Tensor) -> PendingSum:
        """Begin the sum of [rows, hidden] over the ranks of this stage, equal on all. It may overwrite `partial`."""
        ...

    def gather(self, columns: Tensor) -> Tensor | None:
        """Return the columns of all ranks of this stage, on its first rank: [rows, ranks * each]. None on the others.

        columns: those of this rank, [rows, each].
        """
        ...

    def all_gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks of this stage, one rank after the other. All ranks give the same shape."""
        ...

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[r]` rows to each rank r of this stage, and return the rows it sends: `received[r]` from rank r."""
        ...

    def gather_context(self, rows: Tensor) -> Tensor:
        """Return the rows of the ranks that share the tokens of this rank's KV heads: [place.context, *rows.shape]."""
        ...

    def exchange_context(self, parts: Tensor) -> Tensor:
        """Send one of `parts` [place.context, ...] to each of these ranks, and return theirs for this one."""
        ...

    def send_to_next(self, hidden: Tensor) -> None:
        """Send hidden states [tokens, hidden] to the next stage; the last stage sends them to the first."""
        ...

    def receive_from_previous(self, hidden: Tensor) -> None:
        """Wait for the hidden states that the previous stage sends, and write them into `hidden` [tokens, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """Implements `PendingSum` with a sum that needs no other rank."""

    total: Tensor

    def wait(self) -> Tensor:
        return self.total


class SingleRank:
    """Implements `Collectives` for a model that one process computes alone."""

    place = RankPlace(rank=0, tensor=1, pipeline=1)

    def begin_sum(self, partial: Tensor) -> Ready:
        return Ready(partial)

    def gather(self, columns: Tensor) -> Tensor:
        return columns

    def all_gather(self, rows: Tensor) -> Tensor:
        return rows

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return rows

    def gather_context(self, rows: Tensor) -> Tensor:
        return rows[None]

    def exchange_context(self, parts: Tensor) -> Tensor:
        return parts

    def send_to_next(self, hidden: Tensor) -> None:
        raise AssertionError("a single rank has no next stage")

    def receive_from_previous(self, hidden: Tensor) -> None:
        raise AssertionError("a single rank has no previous stage")
