"""Handoffs by a pool: the source puts a request's blocks into a tier that both hosts have, the target takes them there.

Neither waits for the other: the source lets go of the request as soon as its blocks are put, whether or not the target
has room by then, and may die after that. What the pool does not have in the end goes directly, while the source lives;
what neither brings is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.control.crossings import Crossings, names_at, prefix_names
from baton.control.handoffs import Start
from baton.control.roads import Roads, tier_road
from baton.core.copies import CopyBlocks
from baton.core.keeping import LoadBlocks, PutEnded, PutWanted, StoreBlocks
from baton.core.messages import PoolEvent, ReleaseBlocks, SendAhead, StartDecode
from baton.core.ports import CostModel
from baton.core.types import BlockHash, HostId, Request, RequestId, TokenBytes, WorkerId
from baton.kv.host_pool import HostPool
from baton.kv.tier import Tier
from baton.policy.handoff import HandoffView, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDesk:
    """What handoffs by the pool need of the carrier."""

    crossings: Crossings
    cost: CostModel
    way: Callable[[HandoffView], Way]
    """The policy."""
    tell_pool: Callable[[HostId, PoolEvent], None]
    begin: Callable[[Start, TokenBytes, HostId], None]
    """Starts the request there with whatever pays: what tiers have, or nothing."""
    hosts: Mapping[WorkerId, HostId]
    """Of the living workers."""
    now_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two hosts, and the tier that both have."""

    source: HostId
    target: HostId
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class _Put:
    """A request that waits until its blocks are in the pool."""

    number: int
    start: Start
    tokens_so_far: TokenBytes
    source: HostId
    target: HostId
    names: tuple[BlockHash, ...]


@dataclass(slots=True)
class _Ahead:
    """A prompt whose blocks are put as they are sealed."""

    source: HostId
    tier: str
    run_blocks: int
    sent_blocks: int = 0


@dataclass(slots=True)
class Central:
    """Per request at most one put that it waits for, and one ahead of that. Bounded by the requests in the cluster."""

    desk: PoolDesk
    roads: Roads = field(default_factory=Roads)
    _puts: dict[RequestId, _Put] = field(default_factory=dict[RequestId, _Put])
    _ahead: dict[RequestId, _Ahead] = field(default_factory=dict[RequestId, _Ahead])
    _begun: int = 0

    @property
    def waiting(self) -> tuple[RequestId, ...]:
        """Requests that wait for a put, or are put as they are computed."""
        return (*self._puts, *self._ahead)

    # ---- what goes by the pool

    def take(self, start: StartDecode, tokens_so_far: TokenBytes, *, source: HostId, target: HostId) -> bool:
        """Let a request go on at the target by the pool, if the policy says so. False: nothing has changed."""
        request, crossings = start.request, self.desk.crossings
        self._ahead.pop(request.id, None)
        pair = self._pair(source, target)
        if pair is None:
            return False
        tokens = crossings.tokens_at(source, start)
        known_tokens = len(memoryview(tokens_so_far).cast("I"))  # the last of them is computed where it goes on
        names = names_at(self._pools[source], self._pools[target], request, min(tokens, known_tokens - 1))
        if self._choose(request, pair, names, tokens) == "direct":
            return False
        self._begun += 1
        put = _Put(
            number=self._begun,
            start=start,
            tokens_so_far=tokens_so_far,
            source=source,
            target=target,
            names=names,
        )
        self._puts[request.id] = put
        missing = names[self._held_blocks(target, names) :]
        self.desk.tell_pool(source, PutWanted(request.id, put.number, pair.tier.name, missing))
        return True

    def send_ahead(self, command: SendAhead, target: HostId) -> bool:
        """Put a prompt's blocks as they are sealed, if the policy says so. False: nothing has changed."""
        request, pair = command.request, self._pair(command.source, target)
        if pair is None or not request.shares_blocks:
            return False
        pool = self._pools[target]
        names = prefix_names(pool, request)
        if self._choose(request, pair, names, request.prompt_tokens) == "direct":
            return False
        self._ahead[request.id] = _Ahead(pair.source, pair.tier.name, max(1, command.run_tokens // pool.block_tokens))
        self.sealed(request.id)
        return True

    def sealed(self, request_id: RequestId) -> None:
        """More of a request is sealed than before."""
        ahead = self._ahead.get(request_id)
        if ahead is None or ahead.source not in self._pools:
            return
        names = self._pools[ahead.source].names(request_id)
        fresh = names[ahead.sent_blocks :]
        if len(fresh) >= ahead.run_blocks:
            ahead.sent_blocks = len(names)
            self.desk.tell_pool(ahead.source, PutWanted(request_id, None, ahead.tier, fresh))

    # ---- what pools answer, and what ends it

    def put_ended(self, ended: PutEnded) -> None:
        """The blocks of a request are in the pool, or will not get there. Of a put that was given up: nothing."""
        put = self._puts.get(ended.request_id)
        if put is not None and put.number == ended.number:
            self._go_on(self._puts.pop(ended.request_id))

    def lose_host(self, host: HostId) -> None:
        """A host is gone. What it had put is in the pool: who waits for more goes on with that."""
        self._ahead = {name: ahead for name, ahead in self._ahead.items() if ahead.source != host}
        for put in [put for put in self._puts.values() if host in (put.source, put.target)]:
            del self._puts[put.start.request.id]
            if put.target != host:
                self._go_on(put)

    def forget(self, request_id: RequestId) -> Start | None:
        """Wait for no put of a request any more. Returns what waited."""
        self._ahead.pop(request_id, None)
        put = self._puts.pop(request_id, None)
        return put.start if put is not None else None

    def find(self, request_id: RequestId) -> Start | None:
        """Find what waits for a put of the request."""
        put = self._puts.get(request_id)
        return put.start if put is not None else None

    def _go_on(self, put: _Put) -> None:
        """Take from the pool what was put. Where that is not all of it: directly, while the source lives."""
        start, source, target, crossings = put.start, put.source, put.target, self.desk.crossings
        if self.desk.hosts.get(start.worker) != target:
            return  # its worker died meanwhile: the coordinator has been told
        pool = self._pools[target]
        reached = pool.tiers.reach(put.names) if pool.tiers is not None else []
        there = reached[-1].blocks if reached else self._held_blocks(target, put.names)
        if there == len(put.names):
            self._let_go(start.request.id, source)
            tokens = there * pool.block_tokens
            crossings.fetch(start, put.tokens_so_far, source=target, target=target, tokens=tokens, names=put.names)
            return
        tokens = crossings.tokens_at(source, start)
        if tokens:
            crossings.fetch(start, put.tokens_so_far, source=source, target=target, tokens=tokens)
        else:
            self.desk.begin(start, put.tokens_so_far, target)

    def _let_go(self, request_id: RequestId, source: HostId) -> None:
        """The source is done with a request: its blocks are cache from now on."""
        if source in self._pools:
            self.desk.crossings.homes[request_id].discard(source)
            self.desk.tell_pool(source, ReleaseBlocks(request_id))

    # ---- what each way costs

    def _choose(self, request: Request, pair: _Pair, names: Sequence[BlockHash], tokens: int) -> Way:
        """Ask the policy, with what was measured. Without a full block there is nothing to put."""
        return self.desk.way(self._view(request, pair, names, tokens)) if names else "direct"

    def _view(self, request: Request, pair: _Pair, names: Sequence[BlockHash], tokens: int) -> HandoffView:
        """Predict what each way takes now."""
        source, target, tier = pair.source, pair.target, pair.tier
        now_s, cost, block_tokens = self.desk.now_s(), self.desk.cost, self._pools[target].block_tokens
        held = self._held_blocks(target, names)
        held_tokens, full_tokens = held * block_tokens, len(names) * block_tokens
        pooled = [tier.has(name) for name in names[held:]]
        missing_tokens = pooled.count(False) * block_tokens
        road, tier_s = tier_road(tier.name), _tier_s(tier, block_tokens)
        return HandoffView(
            request=request,
            tokens=tokens - held_tokens,
            pooled_tokens=(pooled.index(False) if missing_tokens else len(pooled)) * block_tokens,
            direct=self.roads.view((source, target), tokens - held_tokens, _wire_s(cost), now_s),
            put=self.roads.view((source, road), missing_tokens, tier_s, now_s),
            get=self.roads.view((road, target), full_tokens - held_tokens, tier_s, now_s),
            rest_s=cost.prefill_s(new_tokens=max(0, tokens - full_tokens), cached_tokens=full_tokens),
        )

    def _pair(self, source: HostId, target: HostId) -> _Pair | None:
        """Find the pool of two hosts: a tier that both have, for blocks of one size.

        None where the model sees a window: of a long prompt the source has the end only, and a pool is read from the
        first block on.
        """
        giver, taker = self._pools.get(source), self._pools.get(target)
        if source == target or giver is None or taker is None or giver.tiers is None or taker.tiers is None:
            return None
        if giver.window is not None:
            return None
        tier = giver.tiers.shared_with(taker.tiers)
        return _Pair(source, target, tier) if tier is not None else None

    def _held_blocks(self, target: HostId, names: Sequence[BlockHash]) -> int:
        """Count the leading ones of these blocks that need not go anywhere: the target's arena has them."""
        tiers = self._pools[target].tiers
        return tiers.held_blocks(names) if tiers is not None else 0

    @property
    def _pools(self) -> Mapping[HostId, HostPool]:
        return self.desk.crossings.pools

    # ---- what was measured

    def begun(self, command: CopyBlocks | StoreBlocks | LoadBlocks) -> None:
        """Bytes are about to go between two hosts, or between a host and a tier."""
        now_s = self.desk.now_s()
        if isinstance(command, CopyBlocks):
            road = (command.source, command.target)
            self.roads.begin(_key(command), road, command.whole_tokens, _wire_s(self.desk.cost), now_s)
            return
        pool = self._pools[command.host]
        name = command.tier if isinstance(command, StoreBlocks) else command.tiers[0]
        tier = next((tier for tier in pool.tiers.tiers if tier.name == name), None) if pool.tiers is not None else None
        if tier is not None:
            here, below = command.host, tier_road(name)
            road = (here, below) if isinstance(command, StoreBlocks) else (below, here)
            tokens = len(command.hashes) * pool.block_tokens
            self.roads.begin(_key(command), road, tokens, _tier_s(tier, pool.block_tokens), now_s)

    def ended(self, command: CopyBlocks | StoreBlocks | LoadBlocks, *, landed: bool) -> None:
        """They are there, or did not get there."""
        self.roads.end(_key(command), landed=landed, now_s=self.desk.now_s())


def _key(command: CopyBlocks | StoreBlocks | LoadBlocks) -> tuple[str, str, int]:
    where = command.target if isinstance(command, CopyBlocks) else command.host
    return (type(command).__name__, where, command.number)


def _wire_s(cost: CostModel) -> Callable[[int], float]:
    return lambda tokens: cost.handoff_s(tokens=tokens, same_host=False)


def _tier_s(tier: Tier, block_tokens: int) -> Callable[[int], float]:
    return lambda tokens: tier.rules.move_s(-(-tokens // block_tokens))
