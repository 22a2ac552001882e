"""Handoffs by a remote pool: the source writes a request's blocks into a tier that both hosts have, the target reads.

Neither waits for the other. The source releases the request once its blocks are written, and may die after that. The
target reads runs that have landed while the rest is written, as far as it has free blocks. Blocks that the pool lacks
in the end are copied directly while the source lives; blocks that neither brings are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from baton.core.handoff_paths import HandoffView, PathChosen
from baton.core.messages import SendAhead, StartDecode
from baton.core.tier_messages import PutEnded, PutWanted
from baton.core.types import BlockHash, HostId, Request, RequestId
from baton.decide.control.advice import Policies
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.host_pools import HostPools
from baton.decide.control.link_estimates import LinkEstimates, tier_link, tier_s
from baton.decide.control.transfer import Steps, Transfer, TransferTable
from baton.decide.kv.tier import Tier

RUN_TOKENS = 128
"""Minimum tokens per write and read if the prompt is not streamed. See `WhileComputing`."""
RUNS_MAX = 8
"""Maximum number of runs per put."""


@dataclass(slots=True, kw_only=True)
class PoolHandoff:
    """One request whose blocks go through a remote pool: its blocks, and the number that the target has read.

    The blocks that were read are cached in the target's arena, so a start there finds them.
    """

    request: Request
    attempt: int
    source: HostId
    target: HostId
    tier: Tier
    hashes: tuple[BlockHash, ...]
    """Hashes of the leading blocks that the target needs."""
    run_blocks: int
    """Minimum blocks per write and read."""
    pooled_blocks: int
    """Leading blocks that the target or the pool is known to have."""
    target_blocks: int
    """Leading blocks that the target has or is reading."""
    start: StartDecode | None = None
    """The start that waits for the put. None: the prompt is streamed into the pool while it is computed."""
    number: int | None = None
    """Number of the put that the start waits for."""
    sent_blocks: int = 0
    """Blocks of a streamed prompt whose writes have been requested."""
    is_put: bool = False
    """The put has ended: the start waits only for a read."""
    is_over: bool = False
    """No further blocks are read ahead: the target has no room, the pool lacks blocks, or the request continues."""


@dataclass(slots=True)
class PoolTransfers:
    """Handoffs and streams through remote pools: at most one per live request."""

    hosts: HostPools
    table: TransferTable
    links: LinkEstimates
    policies: Policies
    _handoffs: dict[RequestId, PoolHandoff] = field(default_factory=dict[RequestId, PoolHandoff])
    _numbers: int = 0

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Requests that wait for a put, or whose prompts are streamed into a pool."""
        return tuple(self._handoffs)

    def start_of(self, request_id: RequestId) -> StartDecode | None:
        """Return the start of the request that waits for a put, or None."""
        handoff = self._handoffs.get(request_id)
        return handoff.start if handoff is not None else None

    # ---- writes into the pool

    def hand_off(self, start: StartDecode, source: HostId, target: HostId, now_s: float) -> Steps[bool]:
        """Begin a handoff through the pool if the policy chooses it. Return whether it does."""
        request = start.request
        stream = self._handoffs.pop(request.id, None)
        tokens = self.hosts.tokens_at(source, start)
        hashes = self.hosts.hashes_at(source, target, request, tokens)
        least_blocks = stream.run_blocks if stream is not None else self._blocks(RUN_TOKENS, target)
        handoff = self._plan(start, source, target, hashes, least_blocks)
        if handoff is None or not (yield from self._choose(handoff, tokens, now_s)):
            return False
        self._numbers += 1
        missing = hashes[handoff.target_blocks :]
        handoff.start, handoff.number = start, self._numbers
        handoff.run_blocks = run_blocks(len(missing), least_blocks)
        self._handoffs[request.id] = handoff
        yield ToPool(source, PutWanted(request.id, handoff.number, handoff.tier.name, missing, handoff.run_blocks))
        yield from self._read_more(handoff)
        return True

    def stream(self, command: SendAhead, target: HostId, now_s: float) -> Steps[bool]:
        """Stream a prompt's blocks into the pool if the policy chooses that. Return whether it does."""
        request = command.request
        hashes = self.hosts.prefix_hashes(target, request) if request.shares_blocks else ()
        least_blocks = self._blocks(command.run_tokens, target)
        handoff = self._plan(command, command.source, target, hashes, least_blocks)
        if handoff is None or not (yield from self._choose(handoff, request.prompt_tokens, now_s)):
            return False
        self._handoffs[request.id] = handoff
        yield from self.sealed(request.id)
        yield from self._read_more(handoff)
        return True

    def sealed(self, request_id: RequestId) -> Steps[None]:
        """Write the newly sealed blocks of a streamed prompt once they fill a run. Its last run may be shorter."""
        stream = self._handoffs.get(request_id)
        if stream is None or stream.start is not None or stream.source not in self.hosts.pools:
            return
        sealed = self.hosts.pools[stream.source].sealed_hashes(request_id)
        fresh = sealed[stream.sent_blocks :]
        if len(fresh) < stream.run_blocks and not (fresh and len(sealed) >= len(stream.hashes)):
            return
        stream.sent_blocks = len(sealed)
        run = run_blocks(len(fresh), stream.run_blocks)
        yield ToPool(stream.source, PutWanted(request_id, None, stream.tier.name, fresh, run))

    def _plan(
        self,
        command: StartDecode | SendAhead,
        source: HostId,
        target: HostId,
        hashes: tuple[BlockHash, ...],
        least_blocks: int,
    ) -> PoolHandoff | None:
        """Return a handoff by a tier that both hosts share. None: there is no such tier, or no full block to put."""
        tier = self.hosts.shared_tier(source, target)
        if tier is None or not hashes:
            return None
        held_blocks = self.hosts.held_blocks(target, hashes)
        return PoolHandoff(
            request=command.request,
            attempt=command.attempt,
            source=source,
            target=target,
            tier=tier,
            hashes=hashes,
            run_blocks=least_blocks,
            pooled_blocks=held_blocks,
            target_blocks=held_blocks,
        )

    def _blocks(self, tokens: int, target: HostId) -> int:
        return max(1, tokens // self.hosts.pools[target].block_tokens)

    # ---- reads from the pool

    def tier_grew(self, tier: str) -> Steps[None]:
        """Read blocks that may have landed in a tier, for every handoff and stream that uses it. Handoffs go first."""
        for handoff in sorted(self._handoffs.values(), key=lambda handoff: handoff.start is None):
            if handoff.tier.name == tier:
                yield from self._read_more(handoff)

    def _read_more(self, handoff: PoolHandoff) -> Steps[None]:
        """Read the blocks that have landed in the pool since the last read, if they fill a run.

        There is one read at a time. Blocks that land meanwhile join the next one, so a slow pool gets few, long reads.
        """
        request, target, hashes = handoff.request, handoff.target, handoff.hashes
        pool = self.hosts.pools.get(target)
        if handoff.is_over or pool is None or (request.id, target) in self.table.reads_ahead:
            return
        while handoff.pooled_blocks < len(hashes) and handoff.tier.has(hashes[handoff.pooled_blocks]):
            handoff.pooled_blocks += 1
        if handoff.pooled_blocks - handoff.target_blocks < handoff.run_blocks:
            return
        hits = self.hosts.tier_hits(target, hashes[: handoff.pooled_blocks])
        blocks = hits[-1].tokens // pool.block_tokens if hits else 0
        if blocks - handoff.target_blocks < handoff.run_blocks:
            return  # the store is busy or suspended
        handoff.target_blocks = blocks
        tokens = blocks * pool.block_tokens
        transfer = self.table.begin(request, source=target, target=target, tokens=tokens, hashes=hashes[:blocks])
        yield transfer.ask_for_blocks(handoff.attempt, pool.block_tokens)

    def read_over(self, read: Transfer, *, is_whole: bool) -> Steps[PoolHandoff | None]:
        """Begin the next read after a read ahead has ended, or return the handoff that waited only for its end."""
        handoff = self._handoffs.get(read.request.id)
        if handoff is None:
            return None
        if handoff.is_put:
            return self._put_over(handoff)
        if handoff.target == read.target:
            handoff.is_over = handoff.is_over or not is_whole
            yield from self._read_more(handoff)
        return None

    # ---- the end

    def put_ended(self, ended: PutEnded) -> PoolHandoff | None:
        """Record the end of a put. Return its handoff if that can continue; None also for a put that was given up."""
        handoff = self._handoffs.get(ended.request_id)
        return self._put_over(handoff) if handoff is not None and handoff.number == ended.number else None

    def _put_over(self, handoff: PoolHandoff) -> PoolHandoff | None:
        """Record the end of a put. Return the handoff if it can continue: no read for it is under way."""
        handoff.is_put = handoff.is_over = True
        if (handoff.request.id, handoff.target) in self.table.reads_ahead:
            return None
        del self._handoffs[handoff.request.id]
        return handoff

    def lose_host(self, host: HostId) -> Iterator[PoolHandoff]:
        """Drop streams from a lost host and handoffs to it. Yield handoffs from it: they use the blocks in the pool."""
        for request_id, handoff in list(self._handoffs.items()):
            if handoff.source == host if handoff.start is None else handoff.target == host:
                del self._handoffs[request_id]
        for handoff in [each for each in self._handoffs.values() if each.source == host]:
            is_current = self._handoffs.get(handoff.request.id) is handoff
            if is_current and (ready := self._put_over(handoff)) is not None:
                yield ready

    def forget(self, request_id: RequestId) -> None:
        """Give up the put, the stream and the reads ahead of this request."""
        handoff = self._handoffs.pop(request_id, None)
        if handoff is not None:
            handoff.is_over = True

    # ---- cost of the paths

    def _choose(self, handoff: PoolHandoff, tokens: int, now_s: float) -> Steps[bool]:
        """Return whether the policy chooses the pool, given the measured times. `tokens`: all tokens to hand off."""
        view = self._view(handoff, tokens, now_s)
        chosen = PathChosen(view, self.policies.choose_path(view))
        yield chosen
        return chosen.path != "direct"

    def _view(self, handoff: PoolHandoff, tokens: int, now_s: float) -> HandoffView:
        """Return the predicted times of both paths."""
        source, target, tier, links = handoff.source, handoff.target, handoff.tier, self.links
        block_tokens, blocks, held = self.hosts.pools[target].block_tokens, len(handoff.hashes), handoff.target_blocks
        held_tokens, full_tokens = held * block_tokens, blocks * block_tokens
        pooled = [tier.has(block_hash) for block_hash in handoff.hashes[held:]]
        missing_tokens = pooled.count(False) * block_tokens
        below, get_s = tier_link(tier.name), tier_s(tier, block_tokens)
        wire_s = partial(links.wire_s, source, target)
        return HandoffView(
            request=handoff.request,
            tokens=tokens - held_tokens,
            pooled_tokens=(pooled.index(False) if missing_tokens else len(pooled)) * block_tokens,
            direct=links.view((source, target), tokens - held_tokens, wire_s, now_s),
            put=links.view((source, below), missing_tokens, get_s, now_s),
            get=links.view((below, target), full_tokens - held_tokens, get_s, now_s),
            run_ratio=min(1.0, run_blocks(blocks - held, handoff.run_blocks) / max(1, blocks - held)),
            rest_s=self.policies.cost.prefill_s(new_tokens=max(0, tokens - full_tokens), cached_tokens=full_tokens),
        )


def run_blocks(blocks: int, least_blocks: int) -> int:
    """Return the blocks per run of a put: large enough for at most RUNS_MAX runs, and at least `least_blocks`."""
    return max(1, least_blocks, -(-blocks // RUNS_MAX))
