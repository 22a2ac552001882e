"""Grants of arena blocks: the order in which requests are served, and the choice of the request to preempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.messages import PoolCommand, PreemptRequest, ToWorker
from baton.core.prefixes import BlocksRemoved
from baton.core.types import RequestId
from baton.decide.kv.arena_blocks import ArenaBlocks
from baton.decide.kv.blocks import Hit
from baton.decide.kv.holding import Holding, granted, idle_younger, less_urgent, may_preempt, youngest_to_preempt
from baton.decide.kv.quotas import Quotas
from baton.decide.kv.read_backs import ReadBacks
from baton.decide.kv.spill import SpillSpace


@dataclass(slots=True, kw_only=True)
class Grants:
    """Serves the oldest request first and preempts the youngest one, so that no request waits forever."""

    arena: ArenaBlocks
    read_backs: ReadBacks
    holdings: Mapping[RequestId, Holding]
    """All holdings of the host."""
    quotas: Quotas
    kept_free_blocks: int
    """Free blocks that `Holding.advance_blocks` never grants. If it is the size of the arena, none is granted early."""
    ahead_blocks: int | None
    """Blocks beyond the computed ones that a request may hold; see `Holding.goal`. None: unlimited."""
    _wanting: dict[RequestId, None] = field(default_factory=dict[RequestId, None])
    """Requests that want blocks, in the order in which they asked. `serve` removes those without a holding."""

    def want(self, request_id: RequestId) -> None:
        """Note that a request wants more blocks than it has."""
        self._wanting[request_id] = None

    def serve(self) -> list[PoolCommand]:
        """Grant as many blocks as possible, oldest request first; running requests before new ones.

        Requests that land from another host are served before requests that begin here, because they free blocks there.
        """
        if not self._wanting:
            return []
        self.quotas.refresh()
        commands: list[PoolCommand] = []
        wanting = [held for key in self._wanting if (held := self.holdings.get(key))]
        waiting = [held for held in wanting if self._missing(held) > 0]
        waiting.sort(key=lambda held: held.age)
        if self._serve_growing(waiting, commands):
            self._serve_new([held for held in waiting if held.landing], commands)
            self._serve_new([held for held in waiting if not held.landing], commands)
        unmet = [held.request.id for held in wanting if held.wanted > len(held.table)]
        self._wanting = {request_id: None for request_id in unmet if request_id in self.holdings}
        return commands

    def _serve_growing(self, waiting: Sequence[Holding], commands: list[PoolCommand]) -> bool:
        """Grant further blocks to running requests. Return False if one of a tenant within its quota has to wait."""
        for comes_last in (False, True):
            for holding in waiting:
                may_grow = holding.table and not (holding.preempting or holding.reading)
                if not may_grow or self._comes_last(holding) != comes_last or not self._missing(holding):
                    continue
                if not (self._grow(holding, commands) or self._is_over(holding)):
                    return False
        return True

    def _serve_new(self, waiting: Sequence[Holding], commands: list[PoolCommand]) -> None:
        """Grant first blocks, until a request of a tenant within its quota has to wait."""
        for comes_last in (False, True):
            for holding in waiting:
                if holding.table or self._comes_last(holding) != comes_last:
                    continue
                if not (self._open(holding, commands) or self._is_over(holding)):
                    return

    def _comes_last(self, holding: Holding) -> bool:
        """Return whether requests of tenants within their quotas are served before this one.

        If this one came first, it could take the blocks that an earlier request of its tenant gives back for them.
        """
        return self._is_over(holding) and not self.quotas.is_oldest(holding)

    def grantable_hit(self, holding: Holding, first: int) -> Hit | None:
        """Return the prefix hit of a request that can be granted at once. None: the request has to wait.

        Requires that no other request waits for blocks, or that this one is first. `first`: as in `ArenaBlocks.hit`.
        """
        self.quotas.refresh()
        hit = self._hit(holding, first)
        has_to_wait = self._wanting and not self.is_first_of_class(holding)
        return None if has_to_wait or not self._has_room(holding, hit) else hit

    def is_first_of_class(self, holding: Holding) -> bool:
        """Return whether a request comes before all others, and its class has reserved blocks."""
        service = holding.request.service
        if service is None or not service.kv_ratio:
            return False
        return all(held.age > holding.age for held in self.holdings.values() if held is not holding)

    def hold(self, holding: Holding, hit: Hit) -> list[BlocksRemoved]:
        """Give a request its prefix hit and the other blocks that it wants. Return the evictions for them."""
        count = hit.count
        self.arena.adopt(holding, hit, holding.prefix)
        return self._take(holding, holding.goal(count, self._ahead(holding)) - count)

    def _hit(self, holding: Holding, first: int) -> Hit:
        hit, spill = self.arena.hit(holding.prefix, first), self.arena.spill
        return hit if spill is None else Hit(hit.behind, hit.blocks[: spill.hit_blocks_max(holding)])

    def _ahead(self, holding: Holding) -> int | None:
        """Return how many blocks beyond the computed ones the request may hold. None: unlimited."""
        spill = self.arena.spill
        return spill.ahead_blocks if spill is not None and spill.is_oversized(holding) else self.ahead_blocks

    def _goal(self, holding: Holding) -> int:
        return holding.goal(holding.computed_tokens // self.arena.block_tokens, self._ahead(holding))

    def _is_over(self, holding: Holding) -> bool:
        """Return whether a request would exceed its tenant's quota. Then requests behind it do not wait for it."""
        return self.quotas.is_over(holding, self._missing(holding))

    def _missing(self, holding: Holding) -> int:
        return self._goal(holding) - len(holding.table)

    def _grow(self, holding: Holding, commands: list[PoolCommand]) -> bool:
        missing = self._missing(holding)
        if self.arena.spill is not None:
            excess = holding.blocks + missing - self.arena.spill.hot_blocks
            if excess > 0:
                self._spill(self.arena.spill, holding, excess, commands)
                missing -= excess  # those are granted once the worker has copied older blocks
                if missing <= 0:
                    return True
        while missing > self.quotas.available(holding, missing, self.arena.blocks):
            if not self._preempt_youngest(holding, missing, commands):
                return False
        commands += self._take(holding, missing)
        commands.append(granted(holding, self.arena.host, self.arena.block_tokens))
        return True

    def _spill(self, spill: SpillSpace, holding: Holding, count: int, commands: list[PoolCommand]) -> None:
        """Order the worker to spill blocks. If no slot is free, preempt the youngest request that holds slots."""
        if holding.spilling or holding.user is None:
            return
        order = spill.begin(holding, count)
        if order is not None:
            commands.append(ToWorker(holding.user, order))
        elif not spill.free and not any(held.preempting for held in self.holdings.values()):
            younger = [held for held in self.holdings.values() if held.behind and held.age > holding.age]
            victim = max(filter(may_preempt, younger), key=lambda held: held.age, default=None)
            if victim is not None:
                self._preempt(victim, commands)

    def _open(self, holding: Holding, commands: list[PoolCommand]) -> bool:
        """Give a request its first blocks: the prefix hit and empty blocks. Return False if there is no room."""
        hit = self._hit(holding, holding.behind)
        if holding.landing:
            self._reclaim(holding, hit)
        if not self._has_room(holding, hit) and not self._displace(holding, hit, commands):
            return False
        was_preempted = holding.preempted and not holding.landing
        commands += self.hold(holding, hit)
        asked = self.read_backs.request_read(holding, self.holdings.values()) if was_preempted else None
        commands.append(asked or granted(holding, self.arena.host, self.arena.block_tokens, cached_blocks=hit.count))
        return True

    def _has_room(self, holding: Holding, hit: Hit) -> bool:
        """Return whether a request can begin without a preemption and leave one block to each running request."""
        blocks, count = self.arena.blocks, hit.count
        needed = holding.goal(count, self._ahead(holding)) - count + blocks.unpinned(hit.blocks)
        left = self.quotas.available(holding, needed, blocks) - needed
        return left >= len(self.holdings) or left >= len([held for held in self.holdings.values() if held.table])

    def _reclaim(self, holding: Holding, hit: Hit) -> None:
        """Take the blocks of younger requests that wait to land on another host. Those requests are recomputed.

        This prevents a deadlock between two full hosts whose requests wait to land on each other.
        """
        for held in idle_younger(self.holdings.values(), holding):
            if self._has_room(holding, hit):
                return
            self.arena.preempt(held)

    def _displace(self, holding: Holding, hit: Hit, commands: list[PoolCommand]) -> bool:
        """Preempt requests for one whose class has reserved blocks, or whose tenant is within its quota.

        Return whether it has room. False: it may not have more blocks, or workers give them back between two steps.
        """
        needed = holding.goal(hit.count, self._ahead(holding)) - hit.count
        victims = self._of_less_urgent(holding, needed)
        if not self.quotas.is_over(holding, needed):
            victims += [held for held in self.quotas.victims(holding, needed) if held not in victims]
        for victim in victims:
            if self._has_room(holding, hit):
                break
            if victim.user is None:
                self.arena.preempt(victim)
            elif not victim.preempting:
                coming = sum(held.blocks for held in self.holdings.values() if held.preempting)
                if coming + self.arena.blocks.available >= needed + len(self.holdings):
                    break
                victim.preempting = True
                commands.append(ToWorker(victim.user, PreemptRequest(victim.request.id, victim.attempt)))
        return bool(victims) and self._has_room(holding, hit)

    def _of_less_urgent(self, holding: Holding, needed_blocks: int) -> list[Holding]:
        """Return the requests of less urgent classes, or none if this class has not reserved enough blocks."""
        service = holding.request.service
        if service is None:
            return []
        used = sum(held.blocks for held in self.holdings.values() if held.request.service == service)
        if used + needed_blocks > service.kv_ratio * self.arena.blocks.total:
            return []
        return less_urgent(self.holdings.values(), service.priority)

    def _take(self, holding: Holding, count: int) -> list[BlocksRemoved]:
        arena = self.arena
        spare_blocks = (arena.blocks.free - count - self.kept_free_blocks) // len(self.holdings)
        if arena.spill is not None:
            spare_blocks = min(spare_blocks, arena.spill.hot_blocks - holding.blocks - count)
        taken, news = arena.take(count + holding.advance_blocks(count, spare_blocks, arena.block_tokens))
        holding.table += tuple(taken)
        self.quotas.refresh()
        return news

    def _preempt_youngest(self, growing: Holding, missing: int, commands: list[PoolCommand]) -> bool:
        """Preempt the youngest request. Return True if its blocks are available at once.

        False: a worker uses the blocks, and gives them back between two steps.
        """
        coming = sum(held.blocks for held in self.holdings.values() if held.preempting or held.released)
        if coming + self.quotas.available(growing, missing, self.arena.blocks) >= missing:
            return False
        victim = next(iter(self.quotas.victims(growing, missing)), None)
        if victim is None and self.quotas.is_over(growing, missing):
            victim = self.quotas.last_victim(growing, missing)
        elif victim is None:
            victim = youngest_to_preempt(self.holdings.values(), growing)
        if victim is None:
            return False  # transfers and reads pin all other blocks; their end calls `serve` again
        return self._preempt(victim, commands)

    def _preempt(self, victim: Holding, commands: list[PoolCommand]) -> bool:
        """Preempt a request. Return True if its blocks are available at once."""
        if victim.user is None:
            self.arena.preempt(victim)
            self.quotas.refresh()
            return True
        victim.preempting = True
        commands.append(ToWorker(victim.user, PreemptRequest(victim.request.id, victim.attempt)))
        return False
