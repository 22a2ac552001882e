"""Sliding-window attention: the KV that may still be read, and the KV that can be freed.

This applies only if every layer of the model has a window. A block holds all layers of its tokens, so only tokens
behind the widest window can be freed.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from baton.core.kv_config import Preemption
from baton.core.validation import Count
from baton.decide.kv.spill import SpillRules, hot_blocks

WINDOW_STEP_TOKENS = 128
"""Tokens are freed in steps of the largest usual block size, so that hosts with other blocks free the same tokens."""


class Window(Struct, frozen=True, kw_only=True):
    """The attention window of a model."""

    tokens: Count
    """Width of the widest window, including the token itself."""
    step_tokens: Count = WINDOW_STEP_TOKENS
    """Tokens are freed in runs of this length, a multiple of every host's block size."""

    def behind_tokens(self, computed_tokens: int) -> int:
        """Return the number of leading tokens whose KV is no longer read after `computed_tokens` tokens.

        One token more than the window is kept, since a handoff may have to compute the last token again.
        """
        return max(0, computed_tokens - self.tokens) // self.step_tokens * self.step_tokens

    @property
    def ahead_tokens(self) -> int:
        """Maximum number of tokens beyond the computed ones for which a request holds blocks."""
        return max(self.tokens, self.step_tokens)

    def room_tokens(self, block_tokens: int) -> int:
        """Return the arena size in tokens that suffices for a request of any length."""
        return self.tokens + self.step_tokens + self.ahead_tokens + 2 * block_tokens


class PromptRules(Struct, frozen=True, kw_only=True):
    """Rules of a host pool for its requests: hash size, attention window, growth and preemption."""

    hash_tokens: int | None = None
    """Tokens per hash of a request. None: one block."""
    window: Window | None = None
    """None: at least one layer attends to all tokens, so no block of a running request is freed."""
    growth_tokens: int | None = None
    """Room for output that is granted together with the first blocks of a prompt. None: the worker asks for blocks."""
    preemption: Preemption = "cheaper"
    """How preempted requests restore KV that the arena has evicted."""
    spill: SpillRules | None = None
    """None: a request may hold as many blocks as the arena has. A model with a window needs none."""


ONE_HASH_A_BLOCK = PromptRules()


def behind_blocks(window: Window | None, computed_tokens: int, block_tokens: int) -> int:
    """Return the number of leading blocks that are no longer read. 0 without a window."""
    return 0 if window is None else window.behind_tokens(computed_tokens) // block_tokens


def request_tokens_max(
    window: Window | None, arena_tokens: int, block_tokens: int, spill: SpillRules | None = None
) -> int | None:
    """Return the maximum tokens of a request that fits into an arena and its spill space. None: any length fits."""
    if spill is not None:
        hot_tokens = hot_blocks(arena_tokens // block_tokens) * block_tokens
        return max(hot_tokens, min(spill.tokens_max, hot_tokens + spill.blocks * block_tokens))
    is_enough = window is not None and arena_tokens >= window.room_tokens(block_tokens)
    return None if is_enough else arena_tokens


def longest_hit(held: Iterable[bool], window: Window | None, block_tokens: int, first: int = 0) -> int:
    """Return the number of leading blocks that need no prefill, given which blocks are held.

    With a window, only the blocks inside it must be held. `first`: blocks before this index are not needed. Without a
    window and with `first` 0, this is the length of the leading run of held blocks.
    """
    found = missing = 0
    for count, is_held in enumerate(held, 1):
        if not is_held:
            missing = count
            if window is None and count > first:
                break
        elif missing <= max(first, behind_blocks(window, count * block_tokens, block_tokens)):
            found = count
    return found
