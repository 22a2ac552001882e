"""Sends the end of a prompt on, layer by layer, while it is computed: what remains after it is the last layers.

A block is contiguous over all layers, so its KV goes over in pieces, and counts at the target when all layers of all
its tokens are there *and* the worker has said after its step that they are computed. Until then the target keeps the
blocks for a landing like any other, and whatever breaks, they are given back: nothing of the chunk counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.copies import CopyBlocks, LandingGranted, LandingWanted, LayersDone, LayerSpan, LeaseWanted
from baton.core.messages import PoolEvent, PrefillFinished
from baton.core.types import BlockId, HostId, RequestId, WorkerId
from baton.decide.control.handoffs import Ahead, Chunk, Handoffs, Move
from baton.decide.kv.hashing import names_of
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.layout import KVLayout


class Wires(Protocol):
    """What it needs of the carrier. See `Desk`."""

    @property
    def tell_pool(self) -> Callable[[HostId, PoolEvent], None]: ...

    @property
    def copy(self) -> Callable[[CopyBlocks], None]: ...


@dataclass(slots=True, kw_only=True)
class Layering:
    """Bounded as handoffs are: one chunk per request that is sent ahead, one copy per group of layers."""

    desk: Wires
    pools: Mapping[HostId, HostPool]
    handoffs: Handoffs
    layouts: dict[HostId, KVLayout] = field(default_factory=dict[HostId, KVLayout])
    """How KV lies on each host. Layers are cut out of blocks only where both ends have one layout, without ranks."""
    go_ahead: Callable[[Ahead], None]
    """Begins to send what there is to send."""
    over: Callable[[Move, bool], None]
    """A chunk has landed whole, or counts for nothing. Nothing reads or writes its blocks any more."""
    _active: dict[RequestId, Move] = field(default_factory=dict[RequestId, Move])
    _copies: dict[int, Move] = field(default_factory=dict[int, Move])
    """By the number of the copy."""

    def groups(self, host: HostId, wanted: int) -> int:
        """Return in how many groups of layers a worker of this host shall tell that they are done. 1: not at all."""
        layout = self.layouts.get(host)
        return min(wanted, layout.layers) if layout is not None and layout.ranks == 1 else 1

    # ---- what workers say

    def told(self, host: HostId, done: LayersDone) -> None:
        """More layers of a step are done, or it has begun. News of what was given up since changes nothing."""
        for request_id, attempt in done.requests:
            ahead = self.handoffs.ahead.get(request_id)
            if ahead is None or (ahead.attempt, ahead.source) != (attempt, host) or not self._can_cut(ahead):
                continue
            if not self.pools[host].is_computing(request_id, attempt, done.worker):
                continue
            if ahead.chunk is None:
                ahead.chunk = Chunk(worker=done.worker)
            ahead.chunk.layers_done = max(ahead.chunk.layers_done, done.layers)
            if ahead.move is None:
                self.go_ahead(ahead)
            elif ahead.move.chunk is not None:
                self._send_done(ahead.move)

    def computed(self, host: HostId, event: PrefillFinished) -> None:
        """The step is over: the last layers can go. To be called before the pool hears of it."""
        move = self._active.get(event.request_id)
        if move is None or move.chunk is None or move.source != host:
            return
        if self.pools[host].is_computing(event.request_id, event.attempt, event.worker):
            move.chunk.is_computed = True
            move.chunk.layers_done = self.layouts[host].layers
            self._send_done(move)

    def call_off(self, request_id: RequestId) -> None:
        """Nobody computes the request's chunk any more, or wants it: what came over of it counts for nothing."""
        move = self._active.get(request_id)
        if move is not None and move.chunk is not None and not move.chunk.is_computed:
            move.chunk.has_failed = True
            self._settle(move)

    def lose(self, lost: WorkerId | HostId) -> None:
        """A worker or a host is gone, and with it what it computed, or was to be sent."""
        for move in list(self._active.values()):
            if move.chunk is not None and lost in (move.chunk.worker, move.source, move.target):
                self.call_off(move.request.id)

    # ---- blocks to land in, and copies

    def begin(self, ahead: Ahead) -> bool:
        """Ask for blocks for the whole prompt, whose end is being computed. False: it is not, or has no blocks yet."""
        request, chunk, source = ahead.request, ahead.chunk, self.pools[ahead.source]
        if chunk is None or not source.is_computing(request.id, ahead.attempt, chunk.worker):
            return False
        blocks = -(-request.prompt_tokens // source.block_tokens)
        if len(source.table(request.id)[0]) < blocks:
            return False
        names = names_of(request.block_hashes, source.block_runs)
        ahead.sent_tokens = request.prompt_tokens
        ahead.move = Move(
            number=self.handoffs.next_number(),
            request=request,
            source=ahead.source,
            target=ahead.target,
            tokens=request.prompt_tokens,
            names=names,
            chunk=chunk,
        )
        self.handoffs.begin(ahead.move)
        self.desk.tell_pool(ahead.target, LandingWanted(request, ahead.attempt, None, blocks, names))
        return True

    def granted(self, move: Move, granted: LandingGranted) -> None:
        """There are blocks: keep those that are read, send what is sealed, and the layers that are done."""
        chunk, source, request = move.chunk, self.pools[move.source], move.request
        assert chunk is not None, f"the handoff of {request.id} waits for no chunk"
        self._active[request.id] = move
        self.desk.tell_pool(move.source, LeaseWanted(request, ()))
        move.is_leasing = move.is_copying = True
        move.cached_tokens = granted.cached_blocks * source.block_tokens
        table, sealed_tokens = source.table(request.id)
        held, end = granted.cached_blocks, len(granted.block_table)
        sealed = max(held, min(sealed_tokens // source.block_tokens, end))
        chunk.read, chunk.write = table[sealed:end], granted.block_table[sealed:end]
        chunk.first_token = sealed * source.block_tokens
        if sealed > held:
            read, write = table[held:sealed], granted.block_table[held:sealed]
            tokens = range(move.cached_tokens, chunk.first_token)
            self._copy(move, read, write, tokens, None)
        self._send_done(move)

    def ended(self, copy: CopyBlocks, *, landed: bool) -> bool:
        """A copy is over. False: it was none of a chunk."""
        move = self._copies.pop(copy.number, None)
        if move is None or move.chunk is None:
            return False
        move.chunk.copies -= 1
        move.chunk.has_failed = move.chunk.has_failed or not landed
        self._settle(move)
        return True

    def settle(self, request_id: RequestId) -> None:
        """Whoever goes on with the request has been told: a chunk that has landed already is over now."""
        move = self._active.get(request_id)
        if move is not None:
            self._settle(move)

    def _can_cut(self, ahead: Ahead) -> bool:
        """Blocks behind a window may be let go while they are computed: then nothing is kept for a landing."""
        source, target = self.layouts.get(ahead.source), self.layouts.get(ahead.target)
        if source is None or source != target or ahead.report or self.pools[ahead.source].window is not None:
            return False
        return self.groups(ahead.source, 2) > 1

    def _send_done(self, move: Move) -> None:
        chunk, layers = move.chunk, self.layouts[move.source].layers
        assert chunk is not None, f"the handoff of {move.request.id} has no chunk"
        if chunk.has_failed or not move.is_copying or chunk.layers_done == chunk.layers_sent:
            return
        span = LayerSpan(chunk.layers_sent, chunk.layers_done, layers)
        chunk.layers_sent = chunk.layers_done
        if chunk.read:
            tokens = range(chunk.first_token, move.tokens)
            self._copy(move, chunk.read, chunk.write, tokens, None if span.end - span.first == layers else span)

    def _copy(
        self,
        move: Move,
        read: tuple[BlockId, ...],
        write: tuple[BlockId, ...],
        tokens: range,
        layers: LayerSpan | None,
    ) -> None:
        copy = CopyBlocks(
            request_id=move.request.id,
            number=self.handoffs.next_number(),
            source=move.source,
            target=move.target,
            read=read,
            write=write,
            first_token=tokens.start,
            tokens=len(tokens),
            layers=layers,
        )
        assert move.chunk is not None, f"the handoff of {move.request.id} has no chunk"
        move.chunk.copies += 1
        self._copies[copy.number] = move
        self.desk.copy(copy)

    def _settle(self, move: Move) -> None:
        """End it once no wire is at work: whole, or in vain. One that is still computed goes on."""
        chunk = move.chunk
        if chunk is None or chunk.copies or not (chunk.has_failed or chunk.is_computed):
            return
        if self._active.get(move.request.id) is move:
            del self._active[move.request.id]
        self.over(move, not chunk.has_failed)
