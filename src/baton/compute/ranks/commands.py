"""The commands that the first rank of a parallel worker sends to the other ranks, step by step. No torch here."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class ForwardSlice(Struct, frozen=True, array_like=True):
    """One slice of a step: `count` tokens at positions start .. start + count. Slices follow each other in order."""

    count: int
    start: int
    blocks: list[int]


class Forward(Struct, frozen=True, array_like=True, tag="f"):
    """Compute the tokens of a step and write their KV."""

    tokens: list[int]
    slices: list[ForwardSlice]
    ahead: int
    """Tokens of the first of two micro-batches. 0: the step is one batch."""
    scratch: bool
    """Write to the rank's scratch block: the worker warms up and must not touch a block of the arena."""


class Project(Struct, frozen=True, array_like=True, tag="p"):
    """Compute this rank's part of the logits of some rows of the last step. Only ranks of the first stage do."""

    picked: list[int]


RankCommand = Forward | Project


class RankCommandChannel(Protocol):
    """Carries commands from the first rank to all other ranks."""

    def send(self, command: RankCommand) -> None:
        """Send a command to every rank but the first, and return without waiting for them."""
        ...
