"""Runs of equal decode steps: the same requests decode one token each, and none joins or leaves.

The simulator skips such steps in closed form. Decisions can change only at the end of a run, so committing a run gives
the same state as committing its steps one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.config import BatchLimits
from baton.decide.control.lane import Lane


@dataclass(slots=True)
class DecodeRun:
    """A plan of several equal decode steps. Counts start at its first step."""

    lanes: Sequence[Lane]
    """The decoding requests, in the order of the step."""
    steps: int
    """Steps until a request reaches its maximum length. The simulator may end the run earlier."""
    asks_after: int
    """Steps after which a request asks for more blocks. At least `steps` if none does."""
    room_steps: int
    """Steps for which every request has blocks; more grants extend it. The run ends after this many steps."""
    context_tokens: int
    """Tokens whose KV the first step reads, including the new ones."""
    seals_blocks: bool
    """True if full blocks are sealed. If False, a step that ends no request has nothing to report."""


def plan_decode_run(lanes: Sequence[Lane]) -> DecodeRun | None:
    """Return the longest run of these lanes. None if one computes a prompt, is to be handed off, or has spilled blocks.

    Blocks that a run seals are recorded late. This is safe if no other request can seal the same hashes, which holds
    for tokens that are decoded for the first time. A later attempt may find such blocks, so its run ends at the next
    block boundary.
    """
    left: list[int] = []
    asks: list[int] = []
    seals_blocks, context_tokens = False, 0
    for lane in lanes:
        length, request = len(lane.tokens), lane.request
        if length - lane.computed_tokens != 1 or lane.until != "end" or length == request.prompt_tokens:
            return None
        if lane.spilled_tokens:
            return None
        left.append(lane.tokens_max - length)
        asks.append(lane.grow_at_tokens - length)
        if request.shares_blocks:
            seals_blocks = True
            if lane.attempt > 1:
                left.append((lane.sealed_blocks + 1) * lane.block_tokens - lane.computed_tokens)
        context_tokens += length
    return DecodeRun(lanes, min(left), min(asks), room_steps(lanes), context_tokens, seals_blocks)


def room_steps(lanes: Sequence[Lane]) -> int:
    """Return the number of steps for which every lane has blocks."""
    return min([len(lane.table) * lane.block_tokens - lane.computed_tokens for lane in lanes])


def asks_after(lanes: Sequence[Lane]) -> int:
    """Return the number of steps after which the first lane asks for more blocks."""
    return min([lane.grow_at_tokens - len(lane.tokens) for lane in lanes])


def takes_turns(lanes: Sequence[Lane], limits: BatchLimits, chosen: int) -> bool:
    """Return whether more lanes decode than a step has places, so that the next step runs other lanes.

    `chosen`: number of lanes in this step.
    """
    places = min(limits.requests_max, limits.step_tokens_max)
    return chosen >= places and sum(lane.remaining_tokens == 1 for lane in lanes) > places
