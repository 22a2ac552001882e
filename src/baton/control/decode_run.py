"""Steps that are alike, as one piece: the same requests decode one token each, and nobody asks, joins or leaves.

A simulation jumps over such steps in closed form. Everything that a step could decide differs only where a run ends, so
booking a run gives the books that booking its steps one by one gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.control.lane import Lane


@dataclass(slots=True)
class DecodeRun:
    """What a batcher plans instead of a step, where all that are chosen decode."""

    lanes: Sequence[Lane]
    """Who decodes, in the order of the step."""
    steps: int
    """Most steps that are alike. In the last one a request may end, since it is as long as its client allowed."""
    context_tokens: int
    """Tokens whose KV the first step reads, the new ones included."""


def plan_decode_run(lanes: Sequence[Lane]) -> DecodeRun | None:
    """See how long these lanes can decode alike. None where one of them computes a prompt, or is to be handed off."""
    steps = context_tokens = 0
    for lane in lanes:
        length, computed_tokens = len(lane.tokens), lane.computed_tokens
        if length - computed_tokens != 1 or lane.until != "end":
            return None
        alike = min(
            len(lane.table) * lane.block_tokens - computed_tokens,
            lane.grow_at_tokens - length,
            lane.tokens_max - length,
        )
        if steps == 0 or alike < steps:
            steps = alike
        context_tokens += length
    return DecodeRun(lanes, steps, context_tokens) if steps else None
