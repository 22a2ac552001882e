"""The ranks of a parallel worker, as the forward pass sees them: where it needs what others computed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton.compute.ranks.place import RankPlace


class Ranks(Protocol):
    """Every verb is called by all ranks that it concerns, in the same order: each waits for the others in it."""

    place: RankPlace

    def summed(self, partial: Tensor) -> Tensor:
        """Add up what the ranks of this stage computed, each [rows, hidden]. All get the same bits. May overwrite."""
        ...

    def joined(self, columns: Tensor) -> Tensor | None:
        """Put the columns of this stage's ranks side by side: [rows, each] to [rows, ranks * each]. Rank 0 gets it."""
        ...

    def pass_on(self, hidden: Tensor) -> None:
        """Send hidden states [tokens, hidden] to the next stage; the last one sends them to the first."""
        ...

    def receive(self, hidden: Tensor) -> None:
        """Wait for the hidden states that the stage before this one passes on, and fill `hidden` with them."""
        ...


class OneRank:
    """A model that one process computes alone."""

    place = RankPlace(rank=0, tensor=1, pipeline=1)

    def summed(self, partial: Tensor) -> Tensor:
        """See `Ranks`. There is nothing to add."""
        return partial

    def joined(self, columns: Tensor) -> Tensor:
        """See `Ranks`. There is nothing to join."""
        return columns

    def pass_on(self, hidden: Tensor) -> None:
        """See `Ranks`."""
        raise AssertionError("one rank has no next stage")

    def receive(self, hidden: Tensor) -> None:
        """See `Ranks`."""
        raise AssertionError("one rank has no stage before it")
