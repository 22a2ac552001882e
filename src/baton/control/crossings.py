"""Brings the KV of requests from host to host: finds blocks to land in, leases what is read, has it copied, tells both.

Two occasions: a request starts where its KV is not, and waits for it; or it still runs, and what is sealed of it is
sent ahead to where it will probably go on, where it lies in the cache until it is wanted. The second leaves little for
the first: only what was computed last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.control.handoffs import ROUNDS_MAX, Ahead, Handoffs, Move, Start
from baton.core.copies import CopyBlocks, LandingEnded, LandingGranted, LandingWanted, LeaseEnded, LeaseWanted
from baton.core.messages import AheadEnded, PoolEvent, ReleaseBlocks, RequestDropped, SendAhead, StartDecode
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, TokenBytes
from baton.kv.host_pool import HostPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What crossings need of the carrier."""

    tell: Callable[[AheadEnded], None]
    """Tells the coordinator."""
    tell_pool: Callable[[HostId, PoolEvent], None]
    """Tells a host's pool, and carries out what follows."""
    begin: Callable[[Start, TokenBytes], None]
    """Starts the request with what its host has of it now."""
    copy: Callable[[CopyBlocks], None]
    """Has blocks copied. `Crossings.copied` is called once for each, however it ends."""


@dataclass(slots=True)
class Crossings:
    """Every handoff between hosts that is under way."""

    desk: Desk
    pools: Mapping[HostId, HostPool]
    homes: Mapping[RequestId, set[HostId]]
    """Hosts whose pool knows the request."""
    block_tokens: int
    handoffs: Handoffs = field(default_factory=Handoffs)

    # ---- a request starts where its KV is not

    def fetch(self, start: Start, tokens_so_far: TokenBytes, *, source: HostId, target: HostId) -> None:
        """Bring over what the source has of the request; then it starts."""
        tokens = self.tokens_at(source, start)
        names = self._names_at(source, start.request, tokens)
        move = Move(
            number=self.handoffs.next_number(),
            request=start.request,
            start=start,
            tokens_so_far=tokens_so_far,
            source=source,
            target=target,
            tokens=tokens,
            names=names,
        )
        self.handoffs.begin(move)
        blocks = -(-tokens // self.block_tokens)
        self.desk.tell_pool(target, LandingWanted(start.request, start.attempt, start.worker, blocks, names))

    def redirect(self, start: Start, target: HostId, tokens_so_far: TokenBytes) -> bool:
        """Let a handoff under way serve this start, or give it up where it goes elsewhere. False: none goes there."""
        request_id = start.request.id
        self.handoffs.ahead.pop(request_id, None)
        move = self.handoffs.find(request_id)
        if move is not None and move.target != target:
            self.give_up(move)
            move = None
        move = move or self.handoffs.revive(request_id, target)
        if move is None:
            return False
        move.start, move.tokens_so_far = start, tokens_so_far
        self.homes[request_id].add(target)
        self.desk.tell_pool(target, start)
        return True

    def best_source(self, start: Start, target: HostId) -> HostId:
        """Choose the host that has most of the request; the target itself where no other has more."""
        homes = sorted(self.homes[start.request.id])
        return max((target, *homes), key=lambda host: self.tokens_at(host, start))

    def tokens_at(self, source: HostId | None, start: Start) -> int:
        """Count the leading tokens of the request whose KV a host can give now."""
        pool = self.pools.get(source) if source is not None else None
        if pool is None:
            return 0
        request = start.request
        if isinstance(start, StartDecode):
            return pool.table(request.id)[1]
        if request.sampling.prompt_logprobs:
            return 0  # every prompt token has to be looked at
        return min(pool.held_tokens(request.block_hashes), request.prompt_tokens - 1)

    def give_up(self, move: Move) -> None:
        """Nobody waits for what this handoff brings. What a wire still reads or writes is freed when it has ended."""
        start, request_id = move.start, move.request.id
        assert start is not None, f"nobody waited for the handoff of {request_id}"
        self.handoffs.stop(move)
        self.homes[request_id].discard(move.target)
        if move.target in self.pools:
            dropped = RequestDropped(request_id, start.attempt, start.worker, preempted=False)
            self.desk.tell_pool(move.target, ReleaseBlocks(request_id))  # first: nothing is granted to it any more
            self.desk.tell_pool(move.target, dropped)

    # ---- a request that runs is sent ahead

    def send_ahead(self, command: SendAhead, target: HostId) -> None:
        """Begin to send what is sealed of a request, and go on with it as more is."""
        ahead = Ahead(
            request=command.request,
            attempt=command.attempt,
            source=command.source,
            target=target,
            run_tokens=command.run_tokens,
            report=command.report,
        )
        self.handoffs.ahead[command.request.id] = ahead
        self._go_ahead(ahead)

    def sealed(self, request_id: RequestId) -> None:
        """More of a request is sealed than before."""
        ahead = self.handoffs.ahead.get(request_id)
        if ahead is not None and ahead.move is None:
            self._go_ahead(ahead)

    def refused(self, request_id: RequestId) -> None:
        """There is no room for what is sent ahead. More of it will find none either, most likely: it is given up."""
        ahead = self.handoffs.ahead[request_id]
        assert ahead.move is not None, f"{request_id} is refused blocks that nobody asked for"
        self.handoffs.drop(ahead.move)
        self._end_ahead(ahead, landed=False)

    def _go_ahead(self, ahead: Ahead) -> None:
        """Send what was sealed since the last time, if it is worth a copy."""
        request_id = ahead.request.id
        names = self.pools[ahead.source].names(request_id) if ahead.source in self.pools else ()
        if not ahead.report:  # who computes the prompt anew in what has landed, computes at least its last token
            names = names[: (ahead.request.prompt_tokens - 1) // self.block_tokens]
        fresh_blocks = len(names) - ahead.sent_blocks
        if ahead.report and (fresh_blocks <= 1 or ahead.rounds >= ROUNDS_MAX):
            self._end_ahead(ahead, landed=True)
            return
        if fresh_blocks <= 0 or fresh_blocks * self.block_tokens < ahead.run_tokens:
            return
        ahead.rounds += 1
        ahead.sent_blocks = len(names)
        ahead.move = Move(
            number=self.handoffs.next_number(),
            request=ahead.request,
            source=ahead.source,
            target=ahead.target,
            tokens=len(names) * self.block_tokens,
            names=names,
        )
        self.handoffs.begin(ahead.move)
        wanted = LandingWanted(ahead.request, ahead.attempt, None, len(names), names)
        self.desk.tell_pool(ahead.target, wanted)

    def _end_ahead(self, ahead: Ahead, *, landed: bool) -> None:
        del self.handoffs.ahead[ahead.request.id]
        if ahead.report:
            self.desk.tell(AheadEnded(ahead.request.id, ahead.attempt, landed))

    # ---- what pools and wires answer

    def granted(self, target: HostId, granted: LandingGranted) -> None:
        """The blocks to land in are there: pin those to copy from, and begin."""
        request_id = granted.request_id
        move = self.handoffs.find_landing(request_id, target)
        assert move is not None, f"{request_id} is granted blocks to land in, and nothing is under way"
        table: tuple[BlockId, ...] = ()
        if move.start is not None:
            move.tokens = min(move.tokens, self.tokens_at(move.source, move.start))
        if move.tokens:
            # Never the whole prompt: whoever goes on in these blocks computes its last token, and others read them.
            full_blocks = (move.request.prompt_tokens - 1) // self.block_tokens
            lease = LeaseWanted(move.request, move.request.block_hashes[:full_blocks])
            self.homes[request_id].add(move.source)  # again: the host may have died meanwhile, and come back
            self.desk.tell_pool(move.source, lease)
            table, computed_tokens = self.pools[move.source].table(request_id)
            move.tokens = min(move.tokens, computed_tokens)
            move.is_leasing = True
        blocks = -(-move.tokens // self.block_tokens)
        move.cached_blocks = granted.cached_blocks
        move.is_copying = True
        copy = CopyBlocks(
            request_id=request_id,
            number=move.number,
            source=move.source,
            target=target,
            read=table[move.cached_blocks : blocks],
            write=granted.block_table[move.cached_blocks : blocks],
            tokens=max(0, move.tokens - move.cached_blocks * self.block_tokens),
        )
        if copy.read:
            self.desk.copy(copy)
        else:
            self.copied(copy, landed=True)

    def copied(self, copy: CopyBlocks, *, landed: bool) -> None:
        """A copy is over: nothing reads its source or writes its target any more."""
        move, waited_for = self.handoffs.end(copy)
        request_id = copy.request_id
        if move.source in self.pools and move.is_leasing:
            self.desk.tell_pool(move.source, LeaseEnded(request_id))
        if move.target in self.pools:
            tokens = max(move.tokens if landed else 0, move.cached_blocks * self.block_tokens)
            ended = LandingEnded(request_id, tokens, move.names[: tokens // self.block_tokens])
            self.desk.tell_pool(move.target, ended)
            if move.start is None:
                self.desk.tell_pool(move.target, ReleaseBlocks(request_id))  # cached from now on, and nobody's
        ahead = self.handoffs.ahead.get(request_id)
        if ahead is not None and ahead.move is move:
            ahead.move = None
            if landed:
                self._go_ahead(ahead)
            else:
                self._end_ahead(ahead, landed=False)
        if waited_for:
            self._go_on(move, landed=landed)

    def _go_on(self, move: Move, *, landed: bool) -> None:
        """Start what has waited; first with the rest of its KV, where this was only what was sent ahead."""
        start = move.start
        assert start is not None, f"nobody waits for {move.request.id}"
        if landed and isinstance(start, StartDecode) and move.target in self.pools:
            source = self.best_source(start, move.target)
            if self.tokens_at(source, start) > self.tokens_at(move.target, start):
                self.fetch(start, move.tokens_so_far, source=source, target=move.target)
                return
        self.desk.begin(start, move.tokens_so_far)

    def _names_at(self, source: HostId, request: Request, tokens: int) -> tuple[BlockHash, ...]:
        """Return the hashes of the request's leading full blocks: those sealed there reach beyond its prompt."""
        blocks = tokens // self.block_tokens
        sealed = self.pools[source].names(request.id)
        return max(sealed[:blocks], request.block_hashes[:blocks], key=len)
