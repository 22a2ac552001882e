"""What the first rank of a parallel worker tells the others to do, step by step. No torch here."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class RowOrder(Struct, frozen=True, array_like=True):
    """One slice of the step: its tokens stand at positions start .. start + count. Rows lie one after the other."""

    count: int
    start: int
    blocks: list[int]


class Forward(Struct, frozen=True, array_like=True, tag="f"):
    """Compute a step's tokens and write their KV."""

    tokens: list[int]
    rows: list[RowOrder]
    scratch: bool
    """Write into memory of your own: the worker warms up, and touches no block of the arena."""


class Project(Struct, frozen=True, array_like=True, tag="p"):
    """Compute your part of the logits of some rows of the last step. For ranks of the first stage."""

    picked: list[int]


Order = Forward | Project


class Orders(Protocol):
    """The way from the first rank to the others."""

    def put(self, order: Order) -> None:
        """Send to every rank but the first. Does not wait for them."""
        ...
