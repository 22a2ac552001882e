"""Grants of blocks of a host's arena: the order of requests that want some, and which request is preempted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.messages import PoolCommand, PreemptRequest, ToWorker
from baton.core.prefixes import BlocksRemoved
from baton.core.types import RequestId
from baton.decide.kv.blocks import Hit
from baton.decide.kv.holding import Holding, granted, idle_younger, youngest_to_preempt
from baton.decide.kv.named_blocks import NamedBlocks
from baton.decide.kv.read_backs import ReadBacks


@dataclass(slots=True, kw_only=True)
class Grants:
    """The oldest request is served first, and the one that arrived last gives way: so nothing waits for ever."""

    names: NamedBlocks
    read_backs: ReadBacks
    holdings: Mapping[RequestId, Holding]
    """All of the host."""
    kept_free_blocks: int
    """See `Holding.stock_blocks`. All blocks of the arena: no request gets more than it asked for."""
    ahead_blocks: int | None
    """See `Holding.goal`."""
    _wanting: dict[RequestId, None] = field(default_factory=dict[RequestId, None])
    """Bounded by the holdings: those that are gone are left out when the rest is served."""

    def want(self, request_id: RequestId) -> None:
        """Note that a holding wants more than it has."""
        self._wanting[request_id] = None

    def serve(self) -> list[PoolCommand]:
        """Grant what can be granted, oldest request first; growth of running requests before new ones.

        What comes from another host goes before what begins here, and does not wait behind it: it frees blocks there.
        """
        if not self._wanting:
            return []
        commands: list[PoolCommand] = []
        wanting = [held for key in self._wanting if (held := self.holdings.get(key))]
        waiting = [held for held in wanting if self._goal(held) > len(held.table)]
        waiting.sort(key=lambda held: held.age)
        for holding in waiting:
            if holding.table and not (holding.preempting or holding.reading) and not self._grow(holding, commands):
                break
        else:
            for is_landing in (True, False):
                for holding in waiting:
                    if not holding.table and holding.landing == is_landing and not self._open(holding, commands):
                        break
        unmet = [held.request.id for held in wanting if held.wanted > len(held.table)]
        self._wanting = {request_id: None for request_id in unmet if request_id in self.holdings}
        return commands

    def to_spare(self, holding: Holding, first: int) -> Hit | None:
        """Return the prefix hit of a request if there are blocks for the rest, and no request waits for any.

        `first`: as in `NamedBlocks.hit`. None: it has to wait.
        """
        hit = self.names.hit(holding.prefix, first)
        return None if self._wanting or not self._has_room(holding, hit) else hit

    def hold(self, holding: Holding, hit: Hit) -> list[BlocksRemoved]:
        """Give a request its prefix hit and as many blocks more as it wants. Return the evictions for them."""
        count = hit.count
        self.names.adopt(holding, hit, holding.prefix)
        return self._take(holding, holding.goal(count, self.ahead_blocks) - count)

    def _goal(self, holding: Holding) -> int:
        return holding.goal(holding.computed_tokens // self.names.block_tokens, self.ahead_blocks)

    def _grow(self, holding: Holding, commands: list[PoolCommand]) -> bool:
        missing = self._goal(holding) - len(holding.table)
        while missing > self.names.blocks.available:
            if not self._preempt_youngest(holding, missing, commands):
                return False
        commands += self._take(holding, missing)
        commands.append(granted(holding, self.names.host, self.names.block_tokens))
        return True

    def _open(self, holding: Holding, commands: list[PoolCommand]) -> bool:
        """Give a request its first blocks: the prefix that is here, and room for the rest of what it wants."""
        hit = self.names.hit(holding.prefix, holding.behind)
        if holding.landing:
            self._reclaim(holding, hit)
        if not self._has_room(holding, hit):
            return False
        was_preempted = holding.preempted and not holding.landing
        commands += self.hold(holding, hit)
        wish = self.read_backs.wish(holding, self.holdings.values()) if was_preempted else None
        commands.append(wish or granted(holding, self.names.host, self.names.block_tokens, cached_blocks=hit.count))
        return True

    def _has_room(self, holding: Holding, hit: Hit) -> bool:
        """Tell whether a request can begin with this hit without preemption, and leave a block to each running one."""
        blocks, count = self.names.blocks, hit.count
        needed = holding.goal(count, self.ahead_blocks) - count + blocks.unpinned(hit.blocks)
        left = blocks.available - needed
        return left >= len(self.holdings) or left >= len([held for held in self.holdings.values() if held.table])

    def _reclaim(self, holding: Holding, hit: Hit) -> None:
        """Take back blocks of younger requests that wait to land on another host: nothing touches those.

        Without it two hosts that are full of what waits for the other wait for ever. The younger is computed again.
        """
        for held in idle_younger(self.holdings.values(), holding):
            if self._has_room(holding, hit):
                return
            self.names.preempt(held)

    def _take(self, holding: Holding, count: int) -> list[BlocksRemoved]:
        names = self.names
        spare_blocks = (names.blocks.free - count - self.kept_free_blocks) // len(self.holdings)
        taken, news = names.take(count + holding.stock_blocks(count, spare_blocks, names.block_tokens))
        holding.table += tuple(taken)
        return news

    def _preempt_youngest(self, growing: Holding, missing: int, commands: list[PoolCommand]) -> bool:
        """Make room by taking the youngest request's blocks. True where room was made at once.

        False: the room comes when a worker answers (it gives blocks back between two steps, never inside one).
        """
        coming = sum(held.blocks for held in self.holdings.values() if held.preempting or held.released)
        if coming + self.names.blocks.available >= missing:
            return False
        victim = youngest_to_preempt(self.holdings.values(), growing)
        if victim is None:
            return False  # wires and reads hold what there is: they end, and say so
        if victim.user is None:
            self.names.preempt(victim)
            return True
        victim.preempting = True
        commands.append(ToWorker(victim.user, PreemptRequest(victim.request.id, victim.attempt)))
        return False
