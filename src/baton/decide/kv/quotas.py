"""Quotas of KV blocks per tenant: for the blocks of running requests, and for the cached ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from baton.core.types import RequestId
from baton.decide.kv.blocks import Blocks, EvictionOrder
from baton.decide.kv.holding import Holding, may_preempt


@runtime_checkable
class QuotaOrder(EvictionOrder, Protocol):
    """An eviction order with quotas. Tenants above theirs lose cached blocks first."""

    def quota(self, tenant: str) -> int:
        """Return the quota of a tenant in blocks of one arena, cached ones and those of running requests together."""
        ...

    def note_used(self, used: Mapping[str, int]) -> None:
        """Record the number of blocks that running requests hold, by tenant."""
        ...

    @property
    def spare_blocks(self) -> int:
        """Number of cached blocks of tenants above their quota, which `pop` returns first."""
        ...


@dataclass(slots=True)
class Quotas:
    """Bounds the blocks that requests of a tenant above its quota take from other tenants.

    Such a tenant may use free blocks. But its requests are preempted for those of tenants within their quotas, and
    evict none of their cached blocks. The oldest request of each tenant is preempted last, and may evict any cached
    block, so that every request makes progress.
    """

    holdings: Mapping[RequestId, Holding]
    orders: Sequence[QuotaOrder]
    """Eviction orders of the arena's blocks, with the same quotas. Empty: there are no quotas."""
    _used: Counter[str] = field(default_factory=Counter[str])
    """Blocks of running requests by tenant. A shared block counts once per request."""
    _oldest: dict[str, Holding] = field(default_factory=dict[str, Holding])
    """The oldest request with blocks of each tenant."""

    @classmethod
    def of(cls, holdings: Mapping[RequestId, Holding], orders: Iterable[EvictionOrder]) -> Quotas:
        """Return the quotas of these eviction orders."""
        return cls(holdings, [order for order in orders if isinstance(order, QuotaOrder)])

    def refresh(self) -> None:
        """Count the blocks of every tenant again. Call it before a series of decisions, and after each grant."""
        if not self.orders:
            return
        self._used.clear()
        self._oldest.clear()
        for held in self.holdings.values():
            if not held.table or held.preempting or held.released:
                continue
            tenant = held.request.tenant
            self._used[tenant] += held.blocks
            if tenant not in self._oldest or held.age < self._oldest[tenant].age:
                self._oldest[tenant] = held

    def is_over(self, holding: Holding, more_blocks: int) -> bool:
        """Return whether the tenant of a request would exceed its quota with `more_blocks`."""
        return bool(self.orders) and holding.request.tenant in self._over(holding, more_blocks)

    def is_oldest(self, holding: Holding) -> bool:
        """Return whether no older request of the same tenant has blocks."""
        return self._oldest.get(holding.request.tenant, holding).age >= holding.age

    def available(self, holding: Holding, more_blocks: int, blocks: Blocks) -> int:
        """Return the number of blocks that a request for `more_blocks` may take."""
        if not self.orders:
            return blocks.available
        used = self._with(holding, more_blocks)
        for order in self.orders:
            order.note_used(used)
        if self.is_oldest(holding) or not self.is_over(holding, more_blocks):
            return blocks.available
        return blocks.free + sum(order.spare_blocks for order in self.orders)

    def victims(self, holding: Holding, more_blocks: int) -> list[Holding]:
        """Return the requests to preempt for `more_blocks` of a request, the youngest first.

        They are of tenants above their quota, and none is the oldest of its tenant.
        """
        return [held for held in self._rivals(holding, more_blocks) if not self._is_oldest(held)]

    def last_victim(self, growing: Holding, more_blocks: int) -> Holding | None:
        """Return the youngest request to preempt for a growing one above its quota, if `victims` has none.

        It is younger than that one, and its tenant is above its quota. None: the growing request waits.
        """
        rivals = self._rivals(growing, more_blocks)
        return next((held for held in rivals if held.age > growing.age), None)

    def _rivals(self, holding: Holding, more_blocks: int) -> list[Holding]:
        """Return the requests of tenants above their quota that can be preempted, the youngest first."""
        if not self.orders:
            return []
        over = self._over(holding, more_blocks)
        found = [held for held in self.holdings.values() if held.request.tenant in over and may_preempt(held)]
        return sorted(found, key=lambda held: held.age, reverse=True)

    def _over(self, holding: Holding, more_blocks: int) -> set[str]:
        """Return the tenants above their quota, if a request gets `more_blocks`."""
        used, quota = self._with(holding, more_blocks), self.orders[0].quota
        return {tenant for tenant, count in used.items() if count > quota(tenant)}

    def _with(self, holding: Holding, more_blocks: int) -> Counter[str]:
        return self._used + Counter({holding.request.tenant: more_blocks})

    def _is_oldest(self, holding: Holding) -> bool:
        return self._oldest.get(holding.request.tenant) is holding
