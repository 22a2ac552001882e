"""Steps that are alike, as one piece: the same requests decode one token each, and nobody joins or leaves.

A simulation jumps over such steps in closed form. Everything that a step could decide differs only where a run ends, so
booking a run gives the books that booking its steps one by one gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.decide.control.lane import Lane


@dataclass(slots=True)
class DecodeRun:
    """What a batcher plans instead of a step, where all that are chosen decode. Counts from its first step."""

    lanes: Sequence[Lane]
    """Who decodes, in the order of the step."""
    steps: int
    """Steps until a request is as long as its client allowed. Whoever plays the run may know that one ends earlier."""
    asks_after: int
    """Steps after which somebody asks for more room. Not less than `steps` where nobody does."""
    room_steps: int
    """Steps that everybody has room for. It grows as room is granted; after so many, the run is over."""
    context_tokens: int
    """Tokens whose KV the first step reads, the new ones included."""
    names_blocks: bool
    """Blocks that become full are sealed under a name. If not, there is nothing to say of a step that ends nobody."""


def plan_decode_run(lanes: Sequence[Lane]) -> DecodeRun | None:
    """See how long these lanes can decode alike. None where one of them computes a prompt, or is to be handed off.

    A run is booked late, and so are the blocks that it seals. That makes no difference as long as nobody else gives the
    same names: true of what a request decodes for the first time. An earlier attempt may have left such blocks.
    """
    left: list[int] = []
    asks: list[int] = []
    names_blocks, context_tokens = False, 0
    for lane in lanes:
        length, request = len(lane.tokens), lane.request
        if length - lane.computed_tokens != 1 or lane.until != "end" or length == request.prompt_tokens:
            return None
        left.append(lane.tokens_max - length)
        asks.append(lane.grow_at_tokens - length)
        if request.shares_blocks:
            names_blocks = True
            if lane.attempt > 1:
                left.append((lane.sealed_blocks + 1) * lane.block_tokens - lane.computed_tokens)
        context_tokens += length
    return DecodeRun(lanes, min(left), min(asks), room_steps(lanes), context_tokens, names_blocks)


def room_steps(lanes: Sequence[Lane]) -> int:
    """Count the steps that each of these lanes has room for."""
    return min([len(lane.table) * lane.block_tokens - lane.computed_tokens for lane in lanes])


def asks_after(lanes: Sequence[Lane]) -> int:
    """Count the steps after which the first of these lanes asks for more room."""
    return min([lane.grow_at_tokens - len(lane.tokens) for lane in lanes])
