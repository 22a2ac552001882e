"""Handoffs between hosts that are under way: whose KV goes from where to where, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.core.copies import CopyBlocks
from baton.core.messages import StartDecode, StartPrefill
from baton.core.types import HostId, Request, RequestId, TokenBytes

Start = StartPrefill | StartDecode


@dataclass(slots=True, kw_only=True)
class Move:
    """One request's KV on its way. First it waits for blocks to land in, then a wire copies."""

    number: int
    """Tells this handoff from an earlier one of the same request."""
    start: Start
    """What happens when it has landed."""
    tokens_so_far: TokenBytes
    """Of the request: what its worker is told then."""
    source: HostId
    target: HostId
    tokens: int
    """Leading tokens whose KV is to be at the target."""
    cached_blocks: int = 0
    """Leading blocks that the target holds already: they are not copied."""
    is_copying: bool = False
    """False while it waits for blocks."""
    is_leasing: bool = False
    """The source keeps its blocks for it."""

    @property
    def request(self) -> Request:
        return self.start.request


@dataclass(slots=True)
class Handoffs:
    """Per request at most one that somebody waits for. Bounded by the requests in the cluster and their attempts."""

    _waited_for: dict[RequestId, Move] = field(default_factory=dict[RequestId, Move])
    _stopped: dict[int, Move] = field(default_factory=dict[int, Move])
    """Nobody waits for them, and their wires have not ended."""
    _begun: int = 0

    def __iter__(self) -> Iterator[Move]:
        yield from self._waited_for.values()
        yield from self._stopped.values()

    def begin(self, command: Start, tokens_so_far: TokenBytes, *, source: HostId, target: HostId, tokens: int) -> Move:
        """Note that a request's KV is to come over."""
        self._begun += 1
        move = Move(
            number=self._begun,
            start=command,
            tokens_so_far=tokens_so_far,
            source=source,
            target=target,
            tokens=tokens,
        )
        self._waited_for[command.request.id] = move
        return move

    def find(self, request_id: RequestId) -> Move | None:
        """Find the handoff that somebody waits for."""
        return self._waited_for.get(request_id)

    def revive(self, request_id: RequestId, target: HostId) -> Move | None:
        """Wait again for a stopped one of this request that still writes there: it brings what is wanted."""
        for move in self._stopped.values():
            if move.request.id == request_id and move.target == target:
                self._waited_for[request_id] = self._stopped.pop(move.number)
                return move
        return None

    def stop(self, move: Move) -> None:
        """Wait for it no longer. Without a wire it is over now, otherwise when that has ended."""
        del self._waited_for[move.request.id]
        if move.is_copying:
            self._stopped[move.number] = move

    def lose_target(self, host: HostId) -> None:
        """Wait no longer for what was to land on a host that is gone."""
        for move in [move for move in self._waited_for.values() if move.target == host]:
            self.stop(move)

    def end(self, copy: CopyBlocks) -> tuple[Move, bool]:
        """Take out the handoff whose wire has ended. Returns it, and whether somebody has waited for it."""
        move = self._stopped.pop(copy.number, None)
        if move is not None:
            return move, False
        return self._waited_for.pop(copy.request_id), True
