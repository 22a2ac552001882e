"""Cache quotas per tenant: tenants above their quota lose blocks first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.core.plugin import load_plugin
from baton.core.types import BlockId
from baton.decide.kv.blocks import BlockFacts, EvictionOrder


@dataclass(slots=True, kw_only=True)
class TenantQuota:
    """Evict a block of the tenant that is furthest above its quota, or of any tenant if none is above it.

    Implements `QuotaOrder`. A tenant may exceed its quota while the arena has free room. A cached block counts for the
    tenant whose request sealed it. Tenants that must not share blocks need different `cache_salt` values.
    """

    blocks_max: int
    """Quota per tenant, in blocks: cached ones, and those of running requests. The sum of all may exceed the arena."""
    tenants: Mapping[str, int] = field(default_factory=dict[str, int])
    """Quotas of single tenants. The empty name stands for anonymous requests."""
    order: str = "lru"
    """Eviction order within one tenant, and over all blocks: a built-in name or `module:Class`."""
    order_options: dict[str, Any] = field(default_factory=dict[str, Any])
    _all: EvictionOrder = field(init=False)
    _own: dict[str, EvictionOrder] = field(default_factory=dict[str, EvictionOrder])
    """The cached blocks of each tenant, in addition to `_all`. Tenants without cached blocks are left out."""
    _tenant_of: dict[BlockId, str] = field(default_factory=dict[BlockId, str])
    _over: dict[str, None] = field(default_factory=dict[str, None])
    """Tenants with cached blocks that are above their quota."""
    _used: Mapping[str, int] = field(default_factory=dict[str, int])
    """Blocks of running requests by tenant. Tenants without any may be left out."""

    def __post_init__(self) -> None:
        self._all = self._inner()

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        tenant = facts.tenant
        own = self._own.get(tenant)
        if own is None:
            own = self._own[tenant] = self._inner()
        own.add(block, facts)
        self._all.add(block, facts)
        self._tenant_of[block] = tenant
        if self._excess(tenant) > 0:
            self._over[tenant] = None

    def remove(self, block: BlockId) -> None:
        tenant = self._tenant_of.pop(block)
        self._all.remove(block)
        self._own[tenant].remove(block)
        self._shrunk(tenant)

    def pop(self) -> BlockId:
        if self._over:
            tenant = max(self._over, key=self._excess)
            block = self._own[tenant].pop()
            self._all.remove(block)
        else:
            block = self._all.pop()
            tenant = self._tenant_of[block]
            self._own[tenant].remove(block)
        del self._tenant_of[block]
        self._shrunk(tenant)
        return block

    def __len__(self) -> int:
        return len(self._tenant_of)

    def quota(self, tenant: str) -> int:
        """Return the quota of a tenant in blocks."""
        return self.tenants.get(tenant, self.blocks_max)

    def note_used(self, used: Mapping[str, int]) -> None:
        """Record the number of blocks that running requests hold, by tenant."""
        self._used = used
        self._over = {tenant: None for tenant in self._own if self._excess(tenant) > 0}

    @property
    def spare_blocks(self) -> int:
        """Number of cached blocks of tenants above their quota, which `pop` returns first."""
        return sum(min(len(self._own[tenant]), self._excess(tenant)) for tenant in self._over)

    def _shrunk(self, tenant: str) -> None:
        if self._excess(tenant) <= 0:
            self._over.pop(tenant, None)
        if not len(self._own[tenant]):
            self._over.pop(tenant, None)
            del self._own[tenant]

    def _excess(self, tenant: str) -> int:
        """Return the number of blocks by which a tenant exceeds its quota."""
        return len(self._own[tenant]) + self._used.get(tenant, 0) - self.quota(tenant)

    def _inner(self) -> EvictionOrder:
        return load_plugin(self.order, self.order_options, expects=EvictionOrder)
