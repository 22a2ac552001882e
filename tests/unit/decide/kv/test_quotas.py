"""Quotas of KV blocks hold for running requests: a tenant above its quota takes none from a tenant within its own."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.messages import (
    BlocksGranted,
    BlocksSealed,
    BlocksWanted,
    PoolCommand,
    PreemptRequest,
    ReleaseBlocks,
    RequestDropped,
    RequestFinished,
    StartPrefill,
    ToWorker,
)
from baton.core.types import BlockHash, HostId, Request, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.quota import TenantQuota

W = WorkerId("w")
BLOCK_TOKENS = 4


class Tenants:
    """A pool of 12 blocks with a quota of 6 for each tenant. The first letter of a request's name is its tenant."""

    def __init__(self, blocks: int = 12, blocks_max: int = 6) -> None:
        self.pool = HostPool(
            host=HostId("h"),
            blocks_total=blocks,
            block_tokens=BLOCK_TOKENS,
            eviction=lambda: TenantQuota(blocks_max=blocks_max),
        )
        self.pool.grants.kept_free_blocks = blocks
        self.now_s = 0.0

    def start(self, name: str, blocks: int) -> list[str]:
        """Start a request that wants so many blocks. Return what the pool does, as do the other methods."""
        self.now_s += 1
        request = Request(
            id=RequestId(name), prompt_tokens=4, output_tokens_max=44, arrived_at_s=self.now_s, tenant=name[0]
        )
        self.pool.handle(StartPrefill(request, 1, W, "end"))
        return self.want(name, blocks)

    def want(self, name: str, blocks: int) -> list[str]:
        return told(self.pool.handle(BlocksWanted(RequestId(name), 1, W, blocks)))

    def drop(self, name: str) -> list[str]:
        """Give back the blocks of a preempted request."""
        return told(self.pool.handle(RequestDropped(RequestId(name), 1, W, preempted=True)))

    def end(self, name: str, *, sealed: int = 0) -> list[str]:
        """End a request, of which so many blocks stay cached."""
        hashes = tuple(BlockHash(f"{name} {index}".encode()) for index in range(sealed))
        self.pool.handle(BlocksSealed(RequestId(name), 1, W, 0, hashes))
        self.pool.handle(RequestFinished(RequestId(name), 1, W, "length"))
        return told(self.pool.handle(ReleaseBlocks(RequestId(name))))


def told(commands: Sequence[PoolCommand]) -> list[str]:
    """Return the grants and preemptions in a short form."""
    orders = [command.command for command in commands if isinstance(command, ToWorker)]
    grants = [
        f"{order.request_id} gets {len(order.block_table)}" for order in orders if isinstance(order, BlocksGranted)
    ]
    return grants + [f"preempt {order.request_id}" for order in orders if isinstance(order, PreemptRequest)]


def test_a_tenant_may_exceed_its_quota_while_there_is_room() -> None:
    tenants = Tenants()
    assert tenants.start("a1", 5) == ["a1 gets 5"]
    assert tenants.start("a2", 5) == ["a2 gets 5"]


def test_a_tenant_above_its_quota_gives_way_to_the_first_blocks_of_another() -> None:
    """Without quotas, the new request waits for the end of another one."""
    tenants = Tenants()
    for name in ("a1", "a2"):
        tenants.start(name, 5)
    assert tenants.start("b1", 4) == ["preempt a2"]
    assert tenants.drop("a2") == ["b1 gets 4"]


def test_a_tenant_above_its_quota_gives_way_to_a_younger_growing_request() -> None:
    """Without quotas, the youngest request would be preempted: the growing one itself."""
    tenants = Tenants()
    for name, blocks in (("a1", 4), ("a2", 4), ("b1", 2)):
        tenants.start(name, blocks)
    assert tenants.want("b1", 5) == ["preempt a2"]
    assert tenants.drop("a2") == ["b1 gets 5"]


def test_a_tenant_above_its_quota_evicts_no_cached_block_of_another() -> None:
    """Its second request waits for its first one, and a request of another tenant does not wait behind it."""
    tenants = Tenants()
    tenants.start("b1", 6)
    tenants.end("b1", sealed=6)
    assert tenants.start("a1", 4) == ["a1 gets 4"]
    assert tenants.start("a2", 4) == []
    assert tenants.pool.view().blocks_cached == 6
    assert tenants.start("c1", 2) == ["c1 gets 2"]
    assert tenants.end("a1") == ["a2 gets 4"]


def test_a_tenant_above_its_quota_uses_its_own_cached_blocks() -> None:
    tenants = Tenants()
    for name in ("a1", "b1"):
        tenants.start(name, 6)
        tenants.end(name, sealed=6)
    assert tenants.start("a2", 3) == ["a2 gets 3"]
    assert tenants.want("a2", 6) == ["a2 gets 6"]
    assert tenants.pool.view().blocks_cached == 6


def test_requests_above_their_quotas_serve_the_oldest_first() -> None:
    """Every tenant is above its quota: the youngest request gives way, so the oldest one ends."""
    tenants = Tenants(blocks_max=1)
    for name in ("a1", "b1", "c1"):
        tenants.start(name, 3)
    assert tenants.want("c1", 5) == ["c1 gets 5"]
    assert tenants.want("b1", 5) == ["preempt c1"]
    assert tenants.want("a1", 5) == []
    assert tenants.drop("c1") == ["a1 gets 5", "b1 gets 5"]
    assert tenants.end("a1") == []
    assert tenants.want("c1", 5) == ["c1 gets 5"]
