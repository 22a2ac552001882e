"""Handoffs by a remote pool: the source writes a request's blocks into a tier that both hosts have, the target reads.

Neither waits for the other. The source releases the request once its blocks are written, and may die after that. The
target reads runs that have landed while the rest is written, as far as it has free blocks. Blocks that the pool lacks
in the end are copied directly while the source lives; blocks that neither brings are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.core.copies import LandingWanted
from baton.core.handoff_paths import HandoffView, WayChosen
from baton.core.messages import SendAhead, StartDecode
from baton.core.tier_messages import PutEnded, PutWanted
from baton.core.types import BlockHash, HostId, Request, RequestId
from baton.decide.control.advice import Policies
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.kv_names import names_at, prefix_names, tokens_at
from baton.decide.control.link_estimates import LinkEstimates, tier_link, tier_s
from baton.decide.control.transfer import PlannedHandoff, PoolRead, Start, Steps, Transfer, TransferTable
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.tier import Tier

RUN_TOKENS = 128
"""Minimum tokens per write and read if the prompt is not streamed. See `WhileComputing`."""
RUNS_MAX = 8
"""Maximum number of runs per put."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two hosts, and a tier that they share."""

    source: HostId
    target: HostId
    tier: Tier


@dataclass(slots=True)
class _PoolStream:
    """A prompt whose blocks are written into the pool while it is computed."""

    source: HostId
    read: PoolRead
    sent_blocks: int = 0


@dataclass(slots=True, kw_only=True)
class PoolTransfers:
    """Handoffs and streams through remote pools: per live request at most one start that waits, and one stream."""

    policies: Policies
    table: TransferTable
    pools: Mapping[HostId, HostPool]
    links: LinkEstimates
    _planned: dict[RequestId, PlannedHandoff] = field(default_factory=dict[RequestId, PlannedHandoff])
    _streams: dict[RequestId, _PoolStream] = field(default_factory=dict[RequestId, _PoolStream])
    _held: dict[RequestId, tuple[Start, HostId]] = field(default_factory=dict[RequestId, tuple[Start, HostId]])
    """Starts that wait for a read ahead, with the host of the read."""
    _numbers: int = 0

    @property
    def waiting(self) -> tuple[RequestId, ...]:
        """Requests that wait for a put or a read ahead, or whose prompts are streamed into a pool."""
        return (*self._planned, *self._streams, *self._held)

    # ---- choice of the path

    def hand_off(self, start: StartDecode, *, source: HostId, target: HostId, now_s: float) -> Steps[bool]:
        """Begin a handoff through the pool if the policy chooses it. Return whether it does."""
        request = start.request
        stream = self._streams.pop(request.id, None)
        pair = self._pair(source, target)
        if pair is None:
            return False
        tokens = tokens_at(self.pools, source, start)
        names = names_at(self.pools[source], self.pools[target], request, tokens)
        least_blocks = stream.read.run_blocks if stream is not None else self._blocks(RUN_TOKENS, target)
        if not (yield from self._choose(request, pair, names, (tokens, least_blocks), now_s)):
            return False
        self._numbers += 1
        read = self._read(start, pair, names)
        missing = names[read.taken_blocks :]
        read.run_blocks = run_blocks(len(missing), least_blocks)
        self._planned[request.id] = PlannedHandoff(number=self._numbers, start=start, source=source, read=read)
        yield ToPool(source, PutWanted(request.id, self._numbers, pair.tier.name, missing, read.run_blocks))
        yield from self._read_more(read)
        return True

    def stream(self, command: SendAhead, target: HostId, now_s: float) -> Steps[bool]:
        """Stream a prompt's blocks into the pool if the policy chooses that. Return whether it does."""
        request, pair = command.request, self._pair(command.source, target)
        if pair is None or not request.shares_blocks:
            return False
        names, least_blocks = prefix_names(self.pools[target], request), self._blocks(command.run_tokens, target)
        if not (yield from self._choose(request, pair, names, (request.prompt_tokens, least_blocks), now_s)):
            return False
        read = self._read(command, pair, names)
        read.run_blocks = least_blocks
        self._streams[request.id] = _PoolStream(pair.source, read)
        yield from self.sealed(request.id)
        yield from self._read_more(read)
        return True

    def sealed(self, request_id: RequestId) -> Steps[None]:
        """Write the newly sealed blocks of a streamed prompt once they fill a run. Its last run may be shorter."""
        stream = self._streams.get(request_id)
        if stream is None or stream.source not in self.pools:
            return
        names, read = self.pools[stream.source].names(request_id), stream.read
        fresh = names[stream.sent_blocks :]
        if len(fresh) < read.run_blocks and not (fresh and len(names) >= len(read.names)):
            return
        stream.sent_blocks = len(names)
        run = run_blocks(len(fresh), read.run_blocks)
        yield ToPool(stream.source, PutWanted(request_id, None, read.tier.name, fresh, run))

    def _read(self, command: StartDecode | SendAhead, pair: _Pair, names: tuple[BlockHash, ...]) -> PoolRead:
        """Return the progress record of a read that begins after the blocks in the target's arena."""
        held = self._held_blocks(pair.target, names)
        return PoolRead(
            request=command.request,
            attempt=command.attempt,
            target=pair.target,
            tier=pair.tier,
            names=names,
            pooled_blocks=held,
            taken_blocks=held,
        )

    # ---- reads from the pool

    def tier_grew(self, tier: str) -> Steps[None]:
        """Read blocks that may have landed in a tier, for every handoff and stream that uses it."""
        for each in [*self._planned.values(), *self._streams.values()]:
            if each.read.tier.name == tier:
                yield from self._read_more(each.read)

    def _read_more(self, read: PoolRead) -> Steps[None]:
        """Read the blocks that have landed in the pool since the last read, if they fill a run.

        There is one read at a time. Blocks that land meanwhile join the next one, so a slow pool gets few, long reads.
        """
        request, target, tier = read.request, read.target, read.tier
        pool = self.pools.get(target)
        if read.is_over or pool is None or pool.tiers is None or (request.id, target) in self.table.reads_ahead:
            return
        while read.pooled_blocks < len(read.names) and tier.has(read.names[read.pooled_blocks]):
            read.pooled_blocks += 1
        if read.pooled_blocks - read.taken_blocks < read.run_blocks:
            return
        reached = pool.tiers.reach(read.names[: read.pooled_blocks])
        blocks = reached[-1].blocks if reached else 0
        if blocks - read.taken_blocks < read.run_blocks:
            return  # the store is busy or suspended
        read.taken_blocks = blocks
        names = read.names[:blocks]
        transfer = Transfer(
            number=self.table.next_number(),
            request=request,
            source=target,
            target=target,
            tokens=blocks * pool.block_tokens,
            names=names,
        )
        self.table.add(transfer)
        yield ToPool(target, LandingWanted(request, read.attempt, None, blocks, names))

    def read_over(self, transfer: Transfer, *, is_whole: bool) -> Steps[Start | PlannedHandoff | None]:
        """Begin the next read after a read ahead has ended, or return the start or handoff that waited for its end."""
        request_id, target = transfer.request.id, transfer.target
        held, planned, stream = self._held.get(request_id), self._planned.get(request_id), self._streams.get(request_id)
        if held is not None and held[1] == target:
            del self._held[request_id]
            return held[0]
        if planned is not None and planned.is_put:
            return self._put_over(planned)
        waiting = planned or stream
        if waiting is not None and waiting.read.target == target:
            waiting.read.is_over = waiting.read.is_over or not is_whole
            yield from self._read_more(waiting.read)
        return None

    def hold(self, start: Start, target: HostId) -> bool:
        """Let a start wait for a read ahead on its host. Return False if there is none."""
        reads = self.table.reads_ahead
        if not reads or (start.request.id, target) not in reads:
            return False
        self._held[start.request.id] = start, target
        return True

    # ---- the end of a put

    def put_ended(self, ended: PutEnded) -> PlannedHandoff | None:
        """Return the handoff whose put has ended, if it can continue. None for a put that was given up."""
        planned = self._planned.get(ended.request_id)
        return self._put_over(planned) if planned is not None and planned.number == ended.number else None

    def _put_over(self, planned: PlannedHandoff) -> PlannedHandoff | None:
        """Record the end of a put. Return the handoff if it can continue: no read for it is under way."""
        request_id, read = planned.start.request.id, planned.read
        if self._planned.get(request_id) is not planned:
            return None
        planned.is_put = read.is_over = True
        if (request_id, read.target) in self.table.reads_ahead:
            return None
        del self._planned[request_id]
        return planned

    # ---- early ends

    def lose_host(self, host: HostId) -> Iterator[PlannedHandoff]:
        """Drop the streams and handoffs of a lost host. Yield handoffs from it, which continue with the put blocks."""
        self._streams = {name: stream for name, stream in self._streams.items() if stream.source != host}
        for planned in [each for each in self._planned.values() if host in (each.source, each.read.target)]:
            if planned.read.target == host:
                del self._planned[planned.start.request.id]
            elif (ready := self._put_over(planned)) is not None:
                yield ready

    def forget(self, request_id: RequestId) -> None:
        """Give up the put, the stream and the read ahead of this request."""
        if not (self._held or self._streams or self._planned):
            return
        self._held.pop(request_id, None)
        for given_up in (self._streams.pop(request_id, None), self._planned.pop(request_id, None)):
            if given_up is not None:
                given_up.read.is_over = True

    def find(self, request_id: RequestId) -> Start | None:
        """Return the start that waits for a put or a read ahead of the request, or None."""
        planned = self._planned.get(request_id)
        if planned is not None:
            return planned.start
        held = self._held.get(request_id)
        return held[0] if held is not None else None

    # ---- cost of the paths

    def _choose(
        self, request: Request, pair: _Pair, names: Sequence[BlockHash], lengths: tuple[int, int], now_s: float
    ) -> Steps[bool]:
        """Return whether the policy chooses the pool, given the measured times. `lengths`: as in `_view`."""
        if not names:
            return False  # without a full block there is nothing to put
        view = self._view(request, pair, names, lengths, now_s)
        chosen = WayChosen(view, self.policies.way(view))
        yield chosen
        return chosen.way != "direct"

    def _view(
        self, request: Request, pair: _Pair, names: Sequence[BlockHash], lengths: tuple[int, int], now_s: float
    ) -> HandoffView:
        """Return the predicted times of both paths. `lengths`: tokens to hand off, and blocks of the shortest run."""
        source, target, tier = pair.source, pair.target, pair.tier
        (tokens, least_blocks), links, block_tokens = lengths, self.links, self.pools[target].block_tokens
        held = self._held_blocks(target, names)
        held_tokens, full_tokens = held * block_tokens, len(names) * block_tokens
        pooled = [tier.has(name) for name in names[held:]]
        missing_tokens = pooled.count(False) * block_tokens
        below, get_s = tier_link(tier.name), tier_s(tier, block_tokens)
        wire_s = partial(links.wire_s, source, target)
        return HandoffView(
            request=request,
            tokens=tokens - held_tokens,
            pooled_tokens=(pooled.index(False) if missing_tokens else len(pooled)) * block_tokens,
            direct=links.view((source, target), tokens - held_tokens, wire_s, now_s),
            put=links.view((source, below), missing_tokens, get_s, now_s),
            get=links.view((below, target), full_tokens - held_tokens, get_s, now_s),
            run_ratio=min(1.0, run_blocks(len(names) - held, least_blocks) / max(1, len(names) - held)),
            rest_s=self.policies.cost.prefill_s(new_tokens=max(0, tokens - full_tokens), cached_tokens=full_tokens),
        )

    def _pair(self, source: HostId, target: HostId) -> _Pair | None:
        """Return a tier that both hosts share, for one block size.

        None if the model has an attention window: the source then holds only the end of a long prompt, but reads from
        a pool begin at the first block.
        """
        giver, taker = self.pools.get(source), self.pools.get(target)
        if source == target or giver is None or taker is None or giver.tiers is None or taker.tiers is None:
            return None
        if giver.window is not None:
            return None
        tier = giver.tiers.shared_with(taker.tiers)
        return _Pair(source, target, tier) if tier is not None else None

    def _held_blocks(self, target: HostId, names: Sequence[BlockHash]) -> int:
        """Return how many of the leading blocks the target's arena has."""
        tiers = self.pools[target].tiers
        return tiers.held_blocks(names) if tiers is not None else 0

    def _blocks(self, tokens: int, target: HostId) -> int:
        return max(1, tokens // self.pools[target].block_tokens)


def run_blocks(blocks: int, least_blocks: int) -> int:
    """Return the blocks per run of a put: large enough for at most RUNS_MAX runs, and at least `least_blocks`."""
    return max(1, least_blocks, -(-blocks // RUNS_MAX))
