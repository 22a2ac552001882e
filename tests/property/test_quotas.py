"""KV quotas of tenants that compete for a full arena: in any order of events, none lives on the quota of another."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.messages import (
    BlocksGranted,
    BlocksRemoved,
    BlocksSealed,
    BlocksStored,
    BlocksWanted,
    PoolEvent,
    PreemptRequest,
    ReleaseBlocks,
    RequestDropped,
    RequestFinished,
    StartPrefill,
    ToWorker,
)
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.quota import TenantQuota

TENANTS = "abc"
QUOTA, BLOCK_TOKENS = 4, 4
TOTAL = QUOTA * len(TENANTS)
LIVE_MAX = 9
DROPS_MAX = 50
W = WorkerId("w")


@dataclass(slots=True)
class Running:
    """A live request as its worker knows it. No request needs more than the quota."""

    request: Request
    wanted: int = 0
    table: tuple[BlockId, ...] = ()
    sealed: int = 0
    yields: bool = False

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def missing(self) -> int:
        return max(0, self.wanted - len(self.table))


def hashes_of(name: str, count: int) -> tuple[BlockHash, ...]:
    """Return hashes of a chain whose name begins with its tenant."""
    return tuple(BlockHash(f"{name}/{depth}".encode()) for depth in range(count))


class CompetingTenants(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.pool = HostPool(
            host=HostId("h"),
            blocks_total=TOTAL,
            block_tokens=BLOCK_TOKENS,
            eviction=lambda: TenantQuota(blocks_max=QUOTA),
        )
        self.live: dict[RequestId, Running] = {}
        self.cached: set[BlockHash] = set()
        """Hashes of sealed blocks that the arena still has, also those that running requests use."""
        self.number = 0

    def used(self) -> Counter[str]:
        """Return the blocks of running requests by tenant, without those that are being given back."""
        used = Counter[str](dict.fromkeys(TENANTS, 0))
        for running in self.live.values():
            used[running.tenant] += 0 if running.yields else len(running.table)
        return used

    def tell(self, event: PoolEvent) -> None:
        removed: list[BlockHash] = []
        for command in self.pool.handle(event):
            match command:
                case BlocksStored(hashes=hashes):
                    self.cached |= set(hashes)
                case BlocksRemoved(hashes=hashes):
                    removed += hashes
                case ToWorker(command=BlocksGranted(request_id=request_id, block_table=table)):
                    self.check_evictions(self.live[request_id], len(table), removed)
                    self.cached -= set(removed)
                    removed.clear()
                    self.live[request_id].table = table
                case ToWorker(command=PreemptRequest(request_id=request_id)):
                    self.live[request_id].yields = True
                case _:
                    raise AssertionError(f"{command} from a pool without tiers and other hosts")
        self.cached -= set(removed)
        self.pool.check()

    def check_evictions(self, to: Running, blocks: int, removed: list[BlockHash]) -> None:
        """Assert that a tenant above its quota has evicted no block of a tenant within its own.

        The oldest request of each tenant may: it has to come to its end.
        """
        used = self.used()
        held = [each for each in self.live.values() if each.tenant == to.tenant and each.table]
        is_oldest = all(to.request.arrived_at_s <= each.request.arrived_at_s for each in held)
        if used[to.tenant] + blocks - len(to.table) <= QUOTA or is_oldest:
            return
        tenants = Counter(block_hash.decode()[0] for block_hash in self.cached)
        for tenant in {block_hash.decode()[0] for block_hash in removed} - {to.tenant}:
            assert used[tenant] + tenants[tenant] > QUOTA, f"{to.request.id} has evicted blocks of {tenant}"

    def ask(self, running: Running, blocks: int) -> None:
        if running.yields or blocks <= running.wanted or blocks > QUOTA:
            return
        running.wanted = blocks
        prefix = () if running.table else hashes_of(f"{running.tenant} shared", blocks - 1)
        self.tell(BlocksWanted(running.request.id, 1, W, blocks, prefix))

    # ---- what may happen

    @precondition(lambda self: len(self.live) < LIVE_MAX)
    @rule(tenant=st.sampled_from(TENANTS), blocks=st.integers(1, QUOTA))
    def start(self, tenant: str, blocks: int) -> None:
        self.number += 1
        request = Request(
            id=RequestId(f"{tenant}{self.number}"),
            prompt_tokens=BLOCK_TOKENS,
            output_tokens_max=(QUOTA - 1) * BLOCK_TOKENS,
            arrived_at_s=float(self.number),
            tenant=tenant,
        )
        running = self.live[request.id] = Running(request)
        self.tell(StartPrefill(request, 1, W, "end"))
        self.ask(running, blocks)

    @rule(data=st.data(), more=st.integers(1, 2))
    def grow(self, data: st.DataObject, more: int) -> None:
        ready = [each for each in self.live.values() if each.table and not each.missing and not each.yields]
        assume(ready)
        running = data.draw(st.sampled_from(ready))
        self.ask(running, len(running.table) + more)

    @rule(data=st.data(), is_shared=st.booleans())
    def seal(self, data: st.DataObject, is_shared: bool) -> None:
        ready = [each for each in self.live.values() if each.sealed < len(each.table) and not each.yields]
        assume(ready)
        running = data.draw(st.sampled_from(ready))
        name = f"{running.tenant} shared" if is_shared and not running.sealed else f"{running.request.id} own"
        first, running.sealed = running.sealed, len(running.table)
        sealed = hashes_of(name, running.sealed)[first:]
        self.tell(BlocksSealed(running.request.id, 1, W, first, sealed))

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        yielding = [each for each in self.live.values() if each.yields]
        assume(yielding)
        self.drop(data.draw(st.sampled_from(yielding)))

    def drop(self, running: Running) -> None:
        wanted = max(running.wanted, 1)
        running.table, running.sealed, running.yields, running.wanted = (), 0, False, 0
        self.tell(RequestDropped(running.request.id, 1, W, preempted=True))
        self.ask(running, wanted)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        assume(self.live)
        running = data.draw(st.sampled_from(list(self.live.values())))
        request_id = running.request.id
        running.yields = False
        self.tell(RequestFinished(request_id, 1, W, "length"))
        running.table = ()
        self.tell(ReleaseBlocks(request_id))
        del self.live[request_id]

    @rule()
    def calm(self) -> None:
        """Let every worker give back what it has to: then no tenant within its quota waits for one above its own."""
        for _ in range(DROPS_MAX):
            yielding = [each for each in self.live.values() if each.yields]
            if not yielding:
                break
            self.drop(yielding[0])
        assert not any(each.yields for each in self.live.values()), "requests take blocks from each other without end"
        used = self.used()
        waiting = [each for each in self.live.values() if each.missing and used[each.tenant] + each.missing <= QUOTA]
        above = [tenant for tenant in TENANTS if used[tenant] > QUOTA]
        assert not (waiting and above), f"{waiting[0].request.id} waits, and {above} use {used}"

    @invariant()
    def blocks_are_conserved(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()


TestCompetingTenants = CompetingTenants.TestCase
