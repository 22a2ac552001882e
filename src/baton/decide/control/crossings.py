"""Brings the KV of requests from host to host: finds blocks to land in, leases what is read, has it copied, tells both.

Two occasions: a request starts where its KV is not, and waits for it; or it still runs, and what is sealed of it is
sent ahead to where it will probably go on, where it lies in the cache until it is wanted. The second leaves little for
the first: only what was computed last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.core.copies import CopyBlocks, LandingEnded, LandingGranted, LandingWanted, LeaseEnded, LeaseWanted
from baton.core.keeping import LoadBlocks, LoadWanted
from baton.core.messages import AheadEnded, PoolEvent, ReleaseBlocks, RequestDropped, SendAhead, StartDecode
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, TokenBytes
from baton.decide.control.handoffs import ROUNDS_MAX, Ahead, Handoffs, Move, Start
from baton.decide.control.layering import Layering
from baton.decide.kv.hashing import names_of, prefix_of
from baton.decide.kv.host_pool import HostPool


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
    """Has blocks copied. `Crossings.ended` is called once for each, however it ends."""
    read_ahead: Callable[[Move, bool], None]
    """Called when a read ahead is over, or was refused blocks: whether all of it is there."""


@dataclass(slots=True)
class Crossings:
    """Every handoff between hosts that is under way."""

    desk: Desk
    pools: Mapping[HostId, HostPool]
    homes: Mapping[RequestId, set[HostId]]
    """Hosts whose pool knows the request."""
    handoffs: Handoffs = field(default_factory=Handoffs)
    layering: Layering = field(init=False)
    """Sends on what is being computed. What workers say of layers goes there."""

    def __post_init__(self) -> None:
        self.layering = Layering(
            desk=self.desk, pools=self.pools, handoffs=self.handoffs, go_ahead=self._go_ahead, over=self._chunk_over
        )

    # ---- a request starts where its KV is not

    def fetch(
        self,
        start: Start,
        tokens_so_far: TokenBytes,
        *,
        source: HostId,
        target: HostId,
        tokens: int,
        names: tuple[BlockHash, ...] | None = None,
    ) -> None:
        """Bring over so many leading tokens of the request; then it starts. The target itself: from its tiers.

        `names`: of the full blocks that they fill there. None: those that the source knows.
        """
        if names is None:
            names = names_at(self.pools[source], self.pools[target], start.request, tokens)
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
        pool = self.pools[target]
        blocks, first = -(-tokens // pool.block_tokens), pool.behind(tokens)
        self.desk.tell_pool(target, LandingWanted(start.request, start.attempt, start.worker, blocks, names, first))

    def redirect(self, start: Start, target: HostId, tokens_so_far: TokenBytes) -> bool:
        """Let a handoff under way serve this start, or give it up where it goes elsewhere. False: none goes there."""
        if self.handoffs.is_empty:
            return False
        request_id = start.request.id
        self.handoffs.ahead.pop(request_id, None)
        self.layering.call_off(request_id)
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
        self.layering.settle(request_id)
        return True

    def best_source(self, start: Start, target: HostId) -> HostId:
        """Choose the host that has most of the request; the target itself where no other has more."""
        homes = self.homes[start.request.id]
        if homes <= {target}:
            return target
        homes = sorted(homes)
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

    def refused(self, target: HostId, request_id: RequestId) -> None:
        """There is no room for what is sent ahead. More of it will find none either, most likely: it is given up."""
        read = self.handoffs.reads_ahead.get((request_id, target))
        if read is not None and not read.is_copying:
            self.handoffs.drop(read)
            self.desk.read_ahead(read, False)
            return
        ahead = self.handoffs.ahead[request_id]
        assert ahead.move is not None, f"{request_id} is refused blocks that nobody asked for"
        self.handoffs.drop(ahead.move)
        self._end_ahead(ahead, landed=False)

    def _go_ahead(self, ahead: Ahead) -> None:
        """Send what was sealed since the last time, if it is worth a copy, or what is being computed."""
        if self.layering.begin(ahead):
            return
        request = ahead.request
        tokens, least_tokens = self._sealed_tokens(ahead), ahead.run_tokens
        first = self.pools[ahead.target].behind(max(tokens, request.prompt_tokens - 1))
        if tokens <= first * self.pools[ahead.target].block_tokens:
            tokens = 0  # nobody will look at it: who goes on there sees what comes later
        fresh_tokens = tokens - ahead.sent_tokens
        if ahead.report:
            least_tokens = 1 + max(self.pools[host].block_tokens for host in (ahead.source, ahead.target))
        if ahead.report and (fresh_tokens < least_tokens or ahead.rounds >= ROUNDS_MAX):
            self._end_ahead(ahead, landed=True)
            return
        if fresh_tokens < max(1, least_tokens):
            return
        ahead.rounds += 1
        ahead.sent_tokens = tokens
        names = names_at(self.pools[ahead.source], self.pools[ahead.target], request, tokens)
        ahead.move = Move(
            number=self.handoffs.next_number(),
            request=request,
            source=ahead.source,
            target=ahead.target,
            tokens=tokens,
            names=names,
        )
        self.handoffs.begin(ahead.move)
        self.desk.tell_pool(ahead.target, LandingWanted(request, ahead.attempt, None, len(names), names, first))

    def _sealed_tokens(self, ahead: Ahead) -> int:
        """Count the leading tokens that whole blocks of both hosts can hold, and that are sealed on the one."""
        source, target = self.pools[ahead.source], self.pools[ahead.target]
        tokens = len(source.names(ahead.request.id)) * source.block_tokens
        if not ahead.report:  # who computes the prompt anew in what has landed, computes at least its last token
            tokens = min(tokens, ahead.request.prompt_tokens - 1)
        tokens -= tokens % target.block_tokens
        return len(names_at(source, target, ahead.request, tokens)) * target.block_tokens

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
        if move.source == target:
            self._granted_read(move, granted)
            return
        if move.chunk is not None:
            self.layering.granted(move, granted)
            return
        move.cached_tokens = granted.cached_blocks * self.pools[target].block_tokens
        if move.start is not None:
            move.tokens = min(move.tokens, self.tokens_at(move.source, move.start))
        table: tuple[BlockId, ...] = ()
        if move.tokens:
            table = self._lease(move)
        move.is_copying = True
        read, write = table, granted.block_table
        if move.tokens > move.cached_tokens:
            source_tokens, target_tokens = self.pools[move.source].block_tokens, self.pools[target].block_tokens
            read = read[move.cached_tokens // source_tokens : -(-move.tokens // source_tokens)]
            write = write[granted.cached_blocks : -(-move.tokens // target_tokens)]
        else:
            read = write = ()
        copy = CopyBlocks(
            request_id=request_id,
            number=move.number,
            source=move.source,
            target=target,
            read=read,
            write=write,
            first_token=move.cached_tokens,
            tokens=max(0, move.tokens - move.cached_tokens),
        )
        if copy.read:
            self.desk.copy(copy)
        else:
            self.ended(copy, blocks=0)

    def _lease(self, move: Move) -> tuple[BlockId, ...]:
        """Keep the blocks that are read where they are, and find out which they are."""
        request, pool = move.request, self.pools[move.source]
        self.homes[request.id].add(move.source)  # again: the host may have died meanwhile, and come back
        self.desk.tell_pool(move.source, LeaseWanted(request, prefix_names(pool, request)))
        table, computed_tokens = pool.table(request.id)
        move.tokens = min(move.tokens, computed_tokens)
        if pool.held_from_tokens(request.id) > move.cached_tokens:
            move.tokens, move.is_too_late = 0, True
        move.is_leasing = True
        return table

    def _granted_read(self, move: Move, granted: LandingGranted) -> None:
        """The blocks to read into are there. What the tiers have by now is read; that may be less than was seen."""
        held, wanted = granted.cached_blocks, len(move.names)
        move.cached_tokens = held * self.pools[move.target].block_tokens
        move.is_copying = True
        wish = LoadWanted(move.request.id, move.number, move.names[held:wanted], granted.block_table[held:wanted])
        self.desk.tell_pool(move.target, wish)

    def ended(self, copy: CopyBlocks | LoadBlocks, *, blocks: int) -> None:
        """A copy or a read is over: nothing reads its source or writes its target any more.

        `blocks`: leading ones of those that it was to bring, that are there. What is not is computed.
        """
        landed = blocks == len(copy.write)
        if isinstance(copy, CopyBlocks) and self.layering.ended(copy, landed=landed):
            return
        move, waited_for = self.handoffs.end(copy.number, copy.request_id)
        landed = landed and not move.is_too_late
        tokens = move.cached_tokens
        if move.target in self.pools:
            there = move.cached_tokens + blocks * self.pools[move.target].block_tokens
            tokens = max(min(move.tokens, there), move.cached_tokens)
        self._land(move, tokens)
        if move.is_read_ahead:
            self.desk.read_ahead(move, tokens >= move.tokens)
            return
        ahead = self.handoffs.ahead.get(move.request.id)
        if ahead is not None and ahead.move is move:
            ahead.move = None
            if landed:
                self._go_ahead(ahead)
            else:
                self._end_ahead(ahead, landed=False)
        if waited_for:
            self._go_on(move, landed=landed)

    def _land(self, move: Move, tokens: int) -> None:
        """Tell both ends that no wire touches their blocks any more, and how many leading tokens' KV is there."""
        request_id = move.request.id
        if move.source in self.pools and move.is_leasing:
            self.desk.tell_pool(move.source, LeaseEnded(request_id))
        if move.target in self.pools:
            names = move.names[: tokens // self.pools[move.target].block_tokens]
            self.desk.tell_pool(move.target, LandingEnded(request_id, tokens, names))
            if move.start is None:
                self.desk.tell_pool(move.target, ReleaseBlocks(request_id))  # cached from now on, and nobody's

    def _chunk_over(self, move: Move, landed: bool) -> None:  # noqa: FBT001  what Layering calls
        """See `Layering.over`. Who computes the prompt anew in what has landed, computes at least its last token."""
        _, waited_for = self.handoffs.end(move.number, move.request.id)
        tokens = move.cached_tokens
        if landed and isinstance(move.start, StartDecode):
            tokens = move.tokens
        elif landed and move.target in self.pools:
            block_tokens = self.pools[move.target].block_tokens
            tokens = (move.request.prompt_tokens - 1) // block_tokens * block_tokens
        self._land(move, max(tokens, move.cached_tokens))
        ahead = self.handoffs.ahead.get(move.request.id)
        if ahead is not None and ahead.move is move:
            self._end_ahead(ahead, landed=landed)
        if waited_for:
            self._go_on(move, landed=landed)

    def _go_on(self, move: Move, *, landed: bool) -> None:
        """Start what has waited; first with the rest of its KV, where this was only what was sent ahead."""
        start = move.start
        assert start is not None, f"nobody waits for {move.request.id}"
        if landed and isinstance(start, StartDecode) and move.target in self.pools:
            source = self.best_source(start, move.target)
            tokens = self.tokens_at(source, start)
            if tokens > self.tokens_at(move.target, start):
                self.fetch(start, move.tokens_so_far, source=source, target=move.target, tokens=tokens)
                return
        self.desk.begin(start, move.tokens_so_far)


def prefix_names(pool: HostPool, request: Request) -> tuple[BlockHash, ...]:
    """Name the full blocks of a prompt that others may go on from, as this host cuts it. See `prefix_of`."""
    return prefix_of(request, block_runs=pool.block_runs, block_tokens=pool.block_tokens)


def names_at(giver: HostPool, taker: HostPool, request: Request, tokens: int) -> tuple[BlockHash, ...]:
    """Name the full blocks that the request's leading tokens fill at the taker, as far as the names are known.

    Those of the prompt are; behind it, those that end where a block sealed at the giver ends.
    """
    blocks, sealed = tokens // taker.block_tokens, giver.names(request.id)
    if giver.block_runs == taker.block_runs:
        return max(sealed[:blocks], names_of(request.block_hashes, taker.block_runs)[:blocks], key=len)
    names = list(names_of(request.block_hashes, taker.block_runs)[:blocks])
    while len(names) < blocks:
        index, rest = divmod((len(names) + 1) * taker.block_runs, giver.block_runs)
        if rest or index > len(sealed):
            break
        names.append(sealed[index - 1])
    return tuple(names)
