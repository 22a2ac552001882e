"""Handoffs between hosts that are under way: whose KV goes from where to where, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.core.messages import StartDecode, StartPrefill
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, TokenBytes, WorkerId, pack_tokens

Start = StartPrefill | StartDecode

NO_TOKENS = pack_tokens(())
ROUNDS_MAX = 8
"""Most copies ahead for one move: each brings what was sealed during the one before."""


@dataclass(slots=True, kw_only=True)
class Chunk:
    """The end of a prompt that goes over layer by layer while a worker computes it."""

    worker: WorkerId
    layers_done: int = 0
    layers_sent: int = 0
    """Their copies have begun."""
    is_computed: bool = False
    """The worker has said so at the end of its step: all that was copied counts."""
    has_failed: bool = False
    """A copy of it has, or its worker has: nothing that was copied counts."""
    read: tuple[BlockId, ...] = ()
    """Where it is computed. Empty until there are blocks for it at the target."""
    write: tuple[BlockId, ...] = ()
    first_token: int = 0
    copies: int = 0
    """Under way, of layers of it and of what was sealed before it."""


@dataclass(slots=True, kw_only=True)
class Move:
    """One request's KV on its way. First it waits for blocks to land in, then a wire copies."""

    number: int
    """Tells this handoff from an earlier one of the same request."""
    request: Request
    source: HostId
    """The target itself: its tiers."""
    target: HostId
    tokens: int
    """Leading tokens whose KV is to be at the target."""
    names: tuple[BlockHash, ...]
    """Hashes of its leading full blocks."""
    start: Start | None = None
    """What happens when it has landed. None: it is sent ahead, and nobody waits for it."""
    tokens_so_far: TokenBytes = NO_TOKENS
    """Of the request: what its worker is told then."""
    cached_tokens: int = 0
    """Leading tokens whose blocks the target holds already: they are not copied."""
    is_copying: bool = False
    """False while it waits for blocks."""
    is_leasing: bool = False
    """The source keeps its blocks for it."""
    is_too_late: bool = False
    """The source has let go of what it would begin with: nothing comes of it."""
    chunk: Chunk | None = None
    """What of it is still being computed when it begins. It then has several copies, each with a number of its own."""

    @property
    def is_read_ahead(self) -> bool:
        """It reads from the target's tiers what somebody will want there later."""
        return self.start is None and self.source == self.target


@dataclass(slots=True, kw_only=True)
class Ahead:
    """A running request whose sealed blocks are sent to where it will probably go on."""

    request: Request
    attempt: int
    source: HostId
    target: HostId
    run_tokens: int
    """Shortest run that is sent."""
    report: bool
    """Somebody waits to hear that little is missing."""
    sent_tokens: int = 0
    rounds: int = 0
    move: Move | None = None
    """The copy that is under way."""
    chunk: Chunk | None = None
    """Set while the end of the prompt is computed, where that can go over by layer."""


@dataclass(slots=True)
class Handoffs:
    """Per request at most one that somebody waits for. Bounded by the requests in the cluster and their attempts."""

    ahead: dict[RequestId, Ahead] = field(default_factory=dict[RequestId, Ahead])
    """Requests that are sent ahead as they grow."""
    reads_ahead: dict[tuple[RequestId, HostId], Move] = field(default_factory=dict[tuple[RequestId, HostId], Move])
    """What is read there from tiers, and not waited for. Whoever is to begin there waits until it is over."""
    _waited_for: dict[RequestId, Move] = field(default_factory=dict[RequestId, Move])
    _stopped: dict[int, Move] = field(default_factory=dict[int, Move])
    """Nobody waits for them, and their wires have not ended."""
    _begun: int = 0

    @property
    def is_empty(self) -> bool:
        """Nothing is under way, of any request."""
        return not (self._waited_for or self._stopped or self.ahead)

    def __iter__(self) -> Iterator[Move]:
        yield from self._waited_for.values()
        yield from self._stopped.values()

    def begin(self, move: Move) -> None:
        """Note that a request's KV is to come over."""
        if move.start is None:
            self._stopped[move.number] = move
        else:
            self._waited_for[move.request.id] = move
        if move.is_read_ahead:
            self.reads_ahead[move.request.id, move.target] = move

    def next_number(self) -> int:
        """Number another handoff."""
        self._begun += 1
        return self._begun

    def find(self, request_id: RequestId) -> Move | None:
        """Find the handoff that somebody waits for."""
        return self._waited_for.get(request_id)

    def find_landing(self, request_id: RequestId, target: HostId) -> Move | None:
        """Find the handoff that waits for blocks there."""
        ahead = self.ahead.get(request_id)
        sent = ahead.move if ahead is not None else None
        for move in (self._waited_for.get(request_id), sent, self.reads_ahead.get((request_id, target))):
            if move is not None and move.target == target and not move.is_copying:
                return move
        return None

    def revive(self, request_id: RequestId, target: HostId) -> Move | None:
        """Wait again for a stopped one of this request that still writes there: it brings what is wanted."""
        for move in self._stopped.values():
            if move.request.id == request_id and move.target == target and not move.is_read_ahead:
                self._waited_for[request_id] = self._stopped.pop(move.number)
                return move
        return None

    def stop(self, move: Move) -> None:
        """Wait for it no longer. Without a wire it is over now, otherwise when that has ended."""
        del self._waited_for[move.request.id]
        if move.is_copying:
            self._stopped[move.number] = move

    def drop(self, move: Move) -> None:
        """Forget what is sent or read ahead and was refused: it has no wire."""
        del self._stopped[move.number]
        self._read(move)

    def lose_host(self, host: HostId) -> list[Ahead]:
        """Wait no longer for what was to land on a host that is gone, and send nothing ahead from it or to it.

        Returns what was sent ahead, and is not any more.
        """
        for move in [move for move in self._waited_for.values() if move.target == host]:
            self.stop(move)
        given_up = [ahead for ahead in self.ahead.values() if host in (ahead.source, ahead.target)]
        for ahead in given_up:
            del self.ahead[ahead.request.id]
        return given_up

    def end(self, number: int, request_id: RequestId) -> tuple[Move, bool]:
        """Take out the handoff whose wires, or read, have ended. Returns it, and whether somebody has waited for it."""
        move = self._stopped.pop(number, None)
        if move is not None:
            self._read(move)
            return move, False
        return self._waited_for.pop(request_id), True

    def _read(self, move: Move) -> None:
        if move.is_read_ahead:
            del self.reads_ahead[move.request.id, move.target]
