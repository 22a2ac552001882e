"""Guard around a user's eviction order: an error in it must not end the pool and the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from baton.core.config import Plugin
from baton.core.plugin import is_ours, plugin_maker
from baton.core.types import BlockId
from baton.decide.control.advice import PolicyFailure, asked
from baton.decide.kv.blocks import BlockFacts, EvictionOrder
from baton.decide.policy.eviction import LeastRecentlyUsed

Result = TypeVar("Result")


class GuardedEviction:
    """Uses a user's eviction order until it raises or evicts a block that is not cached; then LRU replaces it."""

    def __init__(self, own: EvictionOrder, broke: Callable[[str], None]) -> None:
        """`broke`: called once with the reason when the user's order is replaced. It may raise."""
        self._own: EvictionOrder | None = own
        self._broke = broke
        self._instead = LeastRecentlyUsed()

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        self._instead.add(block, facts)
        self._ask(lambda own: own.add(block, facts))

    def remove(self, block: BlockId) -> None:
        self._instead.remove(block)
        self._ask(lambda own: own.remove(block))

    def pop(self) -> BlockId:
        block = self._ask(self._take)
        return self._instead.pop() if block is None else block

    def _take(self, own: EvictionOrder) -> BlockId:
        block = own.pop()
        try:
            self._instead.remove(block)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it gave up block {block!r}, which is not cached") from error
        return BlockId(int(block))  # a value that equals a block id may be no index, such as 3.0

    def __len__(self) -> int:
        return len(self._instead)

    def _ask(self, ask: Callable[[EvictionOrder], Result]) -> Result | None:
        own = self._own
        if own is None:
            return None
        answer = asked(own, lambda: ask(own))
        if not isinstance(answer, PolicyFailure):
            return answer
        self._replace(answer.reason)
        return None

    def _replace(self, why: str) -> None:
        self._own = None
        self._broke(f"{why}; the least recently used block is given up instead, from now on")


def eviction_maker(plugin: Plugin, broke: Callable[[str], None]) -> Callable[[], EvictionOrder]:
    """Return a function that makes the configured eviction order. Raise ConfigError if it is invalid.

    `broke`: called when a user's order breaks its contract; see `GuardedEviction`.
    """
    make = plugin_maker(plugin.use, plugin.options, expects=EvictionOrder)
    return make if is_ours(plugin.use) else lambda: GuardedEviction(make(), broke)
