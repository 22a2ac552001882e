"""Models none of whose layers sees further back than a window: which KV somebody may still read, and which nobody will.

A block holds all layers of its tokens, so only what is behind the widest window of all layers is of no use. Where one
layer sees everything, there is no window here, and nothing is let go.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from baton.core.config import Preemption
from baton.core.validation import Count

WINDOW_STEP_TOKENS = 128
"""The largest block that is common between hosts: all of them let go at the same positions, whatever their blocks."""


class Window(Struct, frozen=True, kw_only=True):
    """How far back the layers of a model see."""

    tokens: Count
    """What the layer with the widest window sees, a token's own position included."""
    step_tokens: Count = WINDOW_STEP_TOKENS
    """Tokens are let go in runs of so many, a multiple of every host's block where blocks differ."""

    def behind_tokens(self, computed_tokens: int) -> int:
        """Count the leading tokens whose KV nobody reads any more, once so many are computed.

        One more is kept than the next token sees: whoever goes on may have to compute the last one again.
        """
        return max(0, computed_tokens - self.tokens) // self.step_tokens * self.step_tokens

    @property
    def ahead_tokens(self) -> int:
        """Tokens beyond the computed ones that a request is given blocks for at a time: it needs no room for more."""
        return max(self.tokens, self.step_tokens)

    def room_tokens(self, block_tokens: int) -> int:
        """Tokens of an arena in which a request gets on, however long it is: all that it ever holds at a time."""
        return self.tokens + self.step_tokens + self.ahead_tokens + 2 * block_tokens


class PromptRules(Struct, frozen=True, kw_only=True):
    """What a pool has to know of requests: how their blocks are named, and how far back the model looks at them."""

    hash_tokens: int | None = None
    """How many tokens each of a request's hashes is of. None: of a block."""
    window: Window | None = None
    """None: at least one layer sees everything, and nothing is let go while a request needs it."""
    growth_tokens: int | None = None
    """Room for output that a prompt gets where its first blocks come with its start: as much as its worker would ask
    for. None: they never do."""
    preemption: Preemption = "cheaper"
    """How requests that are preempted get back the KV that the arena loses of them."""


ONE_HASH_A_BLOCK = PromptRules()


def behind_blocks(window: Window | None, computed_tokens: int, block_tokens: int) -> int:
    """Count the leading blocks that nobody reads any more. 0 without a window."""
    return 0 if window is None else window.behind_tokens(computed_tokens) // block_tokens


def request_tokens_max(window: Window | None, arena_tokens: int, block_tokens: int) -> int | None:
    """The longest request that an arena can hold alone. None: it gets on with any."""
    is_enough = window is not None and arena_tokens >= window.room_tokens(block_tokens)
    return None if is_enough else arena_tokens


def longest_hit(held: Iterable[bool], window: Window | None, block_tokens: int, first: int = 0) -> int:
    """Count the leading blocks of a prompt that need not be computed where these are held: the last ones suffice.

    `first`: blocks before it are of no use to whoever asks, whatever the window. Without a window and with first 0 it
    is the length of the unbroken run from the first block on.
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
