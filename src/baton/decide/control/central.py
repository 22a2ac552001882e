"""Handoffs by a pool: the source puts a request's blocks into a tier that both hosts have, the target takes them there.

Neither waits for the other: the source lets go of the request as soon as its blocks are put, whether or not the target
has room by then, and may die after that. The target takes what has landed while the rest is put, as far as it has room
to spare. What the pool does not have in the end goes directly, while the source lives; what neither brings is computed
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.core.keeping import PutEnded, PutWanted
from baton.core.messages import CoordinatorCommand, PoolEvent, ReleaseBlocks, SendAhead, StartDecode
from baton.core.types import BlockHash, HostId, Request, RequestId, TokenBytes, WorkerId
from baton.core.ways import HandoffView, Way, WayChosen, WayWanted
from baton.decide.control.crossings import Crossings, names_at, prefix_names
from baton.decide.control.handoffs import Move, Start
from baton.decide.control.roads import tier_road
from baton.decide.control.survey import Survey, tier_s
from baton.decide.control.takes import RUN_TOKENS, Flow, follow, run_blocks
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.tier import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDesk:
    """What handoffs by the pool need of the carrier."""

    crossings: Crossings
    ask: Callable[[WayWanted], Sequence[CoordinatorCommand]]
    """Asks the coordinator, who asks the policy: so the log has the question with its answer (INV-7)."""
    tell_pool: Callable[[HostId, PoolEvent], None]
    begin: Callable[[Start, TokenBytes, HostId], None]
    """Starts the request there with whatever pays: what tiers have, or nothing."""
    place: Callable[[Start, TokenBytes], None]
    """Starts a request that has waited for a read ahead."""
    hosts: Mapping[WorkerId, HostId]
    """Of the living workers."""
    survey: Survey


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two hosts, and the tier that both have."""

    source: HostId
    target: HostId
    tier: Tier


@dataclass(slots=True, kw_only=True)
class _Put:
    """A request that waits until its blocks are in the pool."""

    number: int
    start: Start
    tokens_so_far: TokenBytes
    source: HostId
    flow: Flow
    is_put: bool = False
    """It waits for what is read ahead, and no longer for the source."""


@dataclass(slots=True)
class _Ahead:
    """A prompt whose blocks are put as they are sealed."""

    source: HostId
    flow: Flow
    sent_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    """A request that is to start where it is read ahead."""

    start: Start
    tokens_so_far: TokenBytes
    target: HostId


@dataclass(slots=True)
class Central:
    """Per request at most one put or read that it waits for, and one ahead of that.

    Bounded by the requests in the cluster.
    """

    desk: PoolDesk
    _puts: dict[RequestId, _Put] = field(default_factory=dict[RequestId, _Put])
    _ahead: dict[RequestId, _Ahead] = field(default_factory=dict[RequestId, _Ahead])
    _held: dict[RequestId, _Held] = field(default_factory=dict[RequestId, _Held])
    _begun: int = 0

    @property
    def waiting(self) -> tuple[RequestId, ...]:
        """Requests that wait for a put or a read ahead, or are put as they are computed."""
        return (*self._puts, *self._ahead, *self._held)

    # ---- what goes by the pool

    def take(self, start: StartDecode, tokens_so_far: TokenBytes, *, source: HostId, target: HostId) -> bool:
        """Let a request go on at the target by the pool, if the policy says so. False: nothing has changed."""
        request, crossings = start.request, self.desk.crossings
        ahead = self._ahead.pop(request.id, None)
        pair = self._pair(source, target)
        if pair is None:
            return False
        tokens = crossings.tokens_at(source, start)
        known_tokens = len(memoryview(tokens_so_far).cast("I"))  # the last of them is computed where it goes on
        names = names_at(self._pools[source], self._pools[target], request, min(tokens, known_tokens - 1))
        least_blocks = ahead.flow.run_blocks if ahead is not None else self._blocks(RUN_TOKENS, target)
        if self._choose(request, pair, names, tokens, least_blocks) == "direct":
            return False
        self._begun += 1
        number, flow = self._begun, self._flow(start, pair, names)
        missing = names[flow.taken_blocks :]
        flow.run_blocks = run_blocks(len(missing), least_blocks)
        self._puts[request.id] = _Put(number=number, start=start, tokens_so_far=tokens_so_far, source=source, flow=flow)
        self.desk.tell_pool(source, PutWanted(request.id, number, pair.tier.name, missing, flow.run_blocks))
        follow(flow, crossings)
        return True

    def send_ahead(self, command: SendAhead, target: HostId) -> bool:
        """Put a prompt's blocks as they are sealed, if the policy says so. False: nothing has changed."""
        request, pair = command.request, self._pair(command.source, target)
        if pair is None or not request.shares_blocks:
            return False
        names, least_blocks = prefix_names(self._pools[target], request), self._blocks(command.run_tokens, target)
        if self._choose(request, pair, names, request.prompt_tokens, least_blocks) == "direct":
            return False
        flow = self._flow(command, pair, names)
        flow.run_blocks = least_blocks
        self._ahead[request.id] = _Ahead(pair.source, flow)
        self.sealed(request.id)
        follow(flow, self.desk.crossings)
        return True

    def sealed(self, request_id: RequestId) -> None:
        """More of a request is sealed than before. The end of its prompt goes at once, however short it is."""
        ahead = self._ahead.get(request_id)
        if ahead is None or ahead.source not in self._pools:
            return
        names, flow = self._pools[ahead.source].names(request_id), ahead.flow
        fresh = names[ahead.sent_blocks :]
        if len(fresh) >= flow.run_blocks or (fresh and len(names) >= len(flow.names)):
            ahead.sent_blocks = len(names)
            runs = run_blocks(len(fresh), flow.run_blocks)
            self.desk.tell_pool(ahead.source, PutWanted(request_id, None, flow.tier.name, fresh, runs))

    def _flow(self, command: StartDecode | SendAhead, pair: _Pair, names: tuple[BlockHash, ...]) -> Flow:
        """Begin where the target's arena ends."""
        held = self._held_blocks(pair.target, names)
        return Flow(
            request=command.request,
            attempt=command.attempt,
            target=pair.target,
            tier=pair.tier,
            names=names,
            pooled_blocks=held,
            taken_blocks=held,
        )

    # ---- what pools answer, and what ends it

    def put_ended(self, ended: PutEnded) -> None:
        """The blocks of a request are in the pool, or will not get there. Of a put that was given up: nothing."""
        put = self._puts.get(ended.request_id)
        if put is not None and put.number == ended.number:
            self._put_over(put)

    def kept(self, tier: str) -> None:
        """More is in this tier than before: what has landed of any request may be worth a read now."""
        for flow in [*(put.flow for put in self._puts.values()), *(ahead.flow for ahead in self._ahead.values())]:
            if flow.tier.name == tier:
                follow(flow, self.desk.crossings)

    def read_over(self, move: Move, *, landed: bool) -> None:
        """A read ahead has ended: what has landed since is read next, or whoever has waited for it goes on."""
        request_id, target = move.request.id, move.target
        held, put, ahead = self._held.get(request_id), self._puts.get(request_id), self._ahead.get(request_id)
        if held is not None and held.target == target:
            del self._held[request_id]
            self.desk.place(held.start, held.tokens_so_far)
            return
        if put is not None and put.is_put:
            self._put_over(put)
            return
        waiting = put or ahead
        if waiting is not None and waiting.flow.target == target:
            waiting.flow.is_over = waiting.flow.is_over or not landed
            follow(waiting.flow, self.desk.crossings)

    def hold(self, start: Start, tokens_so_far: TokenBytes, target: HostId) -> bool:
        """Let a request wait for what is read ahead where it is to start; then it is placed. False: nothing is read."""
        reads = self.desk.crossings.handoffs.reads_ahead
        if not reads or (start.request.id, target) not in reads:
            return False
        self._held[start.request.id] = _Held(start, tokens_so_far, target)
        return True

    def lose_host(self, host: HostId) -> None:
        """A host is gone. What it had put is in the pool: who waits for more goes on with that."""
        self._ahead = {name: ahead for name, ahead in self._ahead.items() if ahead.source != host}
        for put in [put for put in self._puts.values() if host in (put.source, put.flow.target)]:
            if put.flow.target == host:
                del self._puts[put.start.request.id]
            else:
                self._put_over(put)

    def forget(self, request_id: RequestId) -> None:
        """Wait for no put of a request any more, nor for what is read ahead of it."""
        if not (self._held or self._ahead or self._puts):
            return
        self._held.pop(request_id, None)
        for given_up in (self._ahead.pop(request_id, None), self._puts.pop(request_id, None)):
            if given_up is not None:
                given_up.flow.is_over = True

    def find(self, request_id: RequestId) -> Start | None:
        """Find what waits for a put of the request, or for what is read ahead of it."""
        waiting = self._puts.get(request_id) or self._held.get(request_id)
        return waiting.start if waiting is not None else None

    def _put_over(self, put: _Put) -> None:
        """Nothing more is put. The request goes on when nothing is being read for it either."""
        request_id, flow = put.start.request.id, put.flow
        put.is_put = flow.is_over = True
        if (request_id, flow.target) not in self.desk.crossings.handoffs.reads_ahead:
            del self._puts[request_id]
            self._go_on(put)

    def _go_on(self, put: _Put) -> None:
        """Take from the pool what was put. Where that is not all of it: directly, while the source lives."""
        start, source, flow, crossings = put.start, put.source, put.flow, self.desk.crossings
        target, names = flow.target, flow.names
        if self.desk.hosts.get(start.worker) != target:
            return  # its worker died meanwhile: the coordinator has been told
        pool = self._pools[target]
        reached = pool.tiers.reach(names) if pool.tiers is not None else []
        there = reached[-1].blocks if reached else self._held_blocks(target, names)
        if there == len(names):
            self._let_go(start.request.id, source)
            tokens = there * pool.block_tokens
            crossings.fetch(start, put.tokens_so_far, source=target, target=target, tokens=tokens, names=names)
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

    def _choose(self, request: Request, pair: _Pair, names: Sequence[BlockHash], tokens: int, least_blocks: int) -> Way:
        """Ask, with what was measured. Without a full block there is nothing to put."""
        if not names:
            return "direct"
        (chosen,) = self.desk.ask(WayWanted(self._view(request, pair, names, tokens, least_blocks)))
        assert isinstance(chosen, WayChosen), f"{request.id} asks for a way, and is told {chosen}"
        return chosen.way

    def _view(
        self, request: Request, pair: _Pair, names: Sequence[BlockHash], tokens: int, least_blocks: int
    ) -> HandoffView:
        """Predict what each way takes now. `least_blocks`: fewer are no run of their own."""
        source, target, tier = pair.source, pair.target, pair.tier
        survey, block_tokens = self.desk.survey, self._pools[target].block_tokens
        now_s, cost, roads = survey.now_s(), survey.cost, survey.roads
        held = self._held_blocks(target, names)
        held_tokens, full_tokens = held * block_tokens, len(names) * block_tokens
        pooled = [tier.has(name) for name in names[held:]]
        missing_tokens = pooled.count(False) * block_tokens
        road, get_s = tier_road(tier.name), tier_s(tier, block_tokens)
        return HandoffView(
            request=request,
            tokens=tokens - held_tokens,
            pooled_tokens=(pooled.index(False) if missing_tokens else len(pooled)) * block_tokens,
            direct=roads.view((source, target), tokens - held_tokens, partial(survey.wire_s, source, target), now_s),
            put=roads.view((source, road), missing_tokens, get_s, now_s),
            get=roads.view((road, target), full_tokens - held_tokens, get_s, now_s),
            run_ratio=min(1.0, run_blocks(len(names) - held, least_blocks) / max(1, len(names) - held)),
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

    def _blocks(self, tokens: int, target: HostId) -> int:
        return max(1, tokens // self._pools[target].block_tokens)

    @property
    def _pools(self) -> Mapping[HostId, HostPool]:
        return self.desk.crossings.pools
