"""Receiving side of the TCP transport: a few connections to one source share the pieces of all pulls from it."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import closing

import xxhash
from msgspec import Struct

from baton.core.errors import TransferError
from baton.move.backoff import Backoff
from baton.move.ipc.challenge import WrongSecretError
from baton.move.ipc.connections import hang_up, limit_waits, receive_views
from baton.move.ipc.dialing import Dialer
from baton.move.transport.offers import REFUSALS, OfferStatus
from baton.move.transport.piecewise_pull import BUG, CLOSED, PiecewisePull, PullPiece
from baton.move.transport.protection import Protection
from baton.move.transport.wire import (
    TRAILER_BYTES,
    BrokenStreamError,
    Verb,
    fit_buffers,
    read_trailer,
    receive_answer,
    request_of,
)

_REQUESTED_MAX = 2
"""Pieces that one connection has requested: the source sends the next one while the first is received."""


class TcpLimits(Struct, frozen=True, kw_only=True):
    """Limits of the connections between a consumer and its sources."""

    streams: int = 4
    """Bound of the connections to one source."""
    piece_bytes: int = 4 << 20
    """Size of a request, and of a retry after a broken connection."""
    connect_s: float = 5.0
    """Time to connect, and then for each answer until the connection is protected."""
    stall_s: float = 15.0
    """A connection without a byte for this time counts as broken."""
    breaks_max: int = 4
    """Connections that may break during one piece. One more fails its pull."""
    pause_s: float = 0.05
    """First pause of the back-off before a broken connection is made again."""
    idle_s: float = 30.0
    """A connection without work for this time is closed."""
    connections_max: int = 512
    """Bound of the connections of consumers to this host."""

    @property
    def backoff(self) -> Backoff:
        """Pauses before a broken connection is made again."""
        return Backoff(self.pause_s, self.pause_s * 2**self.breaks_max)


class TcpPeer:
    """Queue of pieces from one source, and its connections. They are made on demand and closed when idle."""

    def __init__(self, address: tuple[str, int], limits: TcpLimits, protection: Protection) -> None:
        self.address = address
        self.dialer = Dialer(*address)
        self.limits = limits
        self.protection = protection
        self._changed = threading.Condition()
        self._wanted: deque[PullPiece] = deque()
        self._streams: dict[TcpStream, threading.Thread] = {}
        self._idle = 0
        self._closed = False

    def add(self, pieces: Iterable[PullPiece]) -> None:
        """Queue pieces, and start connections for them."""
        why = CLOSED
        with self._changed:
            self._wanted.extend(pieces)
            missing = min(len(self._wanted) - self._idle, self.limits.streams - len(self._streams))
            for _ in range(0 if self._closed else missing):
                stream = TcpStream(self)
                thread = threading.Thread(target=stream.run, name="baton-pull", daemon=True)
                self._streams[stream] = thread
                try:
                    thread.start()
                except RuntimeError as error:
                    del self._streams[stream]
                    why = f"no thread can be started that receives: {error}"
                    break
            self._changed.notify_all()
        self._fail_stranded(why)

    def take(self, stream: TcpStream, *, wait: bool) -> PullPiece | None:
        """Return the next piece, or None. With `wait`, block up to `idle_s`; after a None the stream must end."""
        with self._changed:
            if wait:
                self._idle += 1
                self._changed.wait_for(lambda: self._closed or self._drop_unwanted(), self.limits.idle_s)
                self._idle -= 1
            if not self._closed and self._drop_unwanted():
                return self._wanted.popleft()
            if wait:
                del self._streams[stream]
            return None

    def requeue(self, pieces: Iterable[PullPiece]) -> None:
        """Put pieces back to the front of the queue, because their stream has not received them."""
        with self._changed:
            self._wanted.extendleft(pieces)
            self._changed.notify_all()
        self._fail_stranded()

    def lose(self, stream: TcpStream, pieces: Iterable[PullPiece]) -> None:
        """Remove a stream that a bug has ended. The pulls of its pieces fail; other streams go on with the rest."""
        with self._changed:
            self._streams.pop(stream, None)
        for piece in pieces:
            piece.pull.fail(BUG)
        self._fail_stranded(BUG)

    def pause(self, pause_s: float) -> None:
        """Wait for `pause_s` seconds, or until `close` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, pause_s)

    def interrupt(self, pull: PiecewisePull) -> None:
        """Break the connections that are receiving bytes of this pull."""
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.interrupt(pull)

    def close(self) -> None:
        """Close all connections. No thread is left when this returns."""
        with self._changed:
            self._closed = True
            streams = dict(self._streams)
            self._changed.notify_all()
        self._fail_stranded()
        for stream, thread in streams.items():
            stream.close()
            thread.join()

    @property
    def is_unused(self) -> bool:
        """True if there is neither work nor a connection."""
        with self._changed:
            return not self._streams and not self._wanted

    def _fail_stranded(self, why: str = CLOSED) -> None:
        """Fail the queued pieces if no stream is left to fetch them."""
        with self._changed:
            refused = list(self._wanted) if self._closed or not self._streams else []
            if refused:
                self._wanted.clear()
        for piece in refused:
            piece.pull.fail(why)

    def _drop_unwanted(self) -> bool:
        """Skip the pieces of pulls that have failed. Return whether there is a piece left."""
        while self._wanted and not self._wanted[0].pull.wanted:
            self._wanted.popleft()
        return bool(self._wanted)


class TcpStream:
    """One connection, and the thread that receives from it."""

    def __init__(self, peer: TcpPeer) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._writing_for: PiecewisePull | None = None
        self._interrupted = False
        self._closed = False
        self._breaks = 0
        """Breaks of the connection since the last piece that landed."""
        self._requested: deque[PullPiece] = deque()

    def run(self) -> None:
        """Fetch pieces until the stream was idle for `idle_s`. A bug fails the requested pieces only."""
        is_over = False
        try:
            self._serve()
            is_over = True
        finally:
            self._disconnect()
            if not is_over:
                self._peer.lose(self, self._requested)

    def _serve(self) -> None:
        while True:
            try:
                if not self._request():
                    return
                self._fetch(self._requested[0])
                self._requested.popleft()
                self._breaks = 0
            except (OSError, ValueError) as error:  # an invalid host name is a ValueError
                self._recover(error)

    def interrupt(self, pull: PiecewisePull) -> None:
        """Break the connection if it is receiving bytes of this pull."""
        with self._lock:
            if self._writing_for is pull and self._connection is not None:
                self._interrupted = True
                hang_up(self._connection)

    def close(self) -> None:
        """Break the connection for good."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                hang_up(self._connection)

    def _request(self) -> bool:
        """Request the next pieces before the current one has arrived. Return False if there is nothing to fetch."""
        while len(self._requested) < _REQUESTED_MAX:
            piece = self._peer.take(self, wait=not self._requested)
            if piece is None:
                break
            self._requested.append(piece)
            pull = piece.pull
            request = request_of(pull.ticket, Verb.READ, pull.target.size_bytes, piece.start, piece.size_bytes)
            connection = self._connected()
            try:
                connection.sendall(request.packed())
            except OSError as error:
                raise _refusal(connection) or error from error
        return bool(self._requested)

    def _fetch(self, piece: PullPiece) -> None:
        connection, pull = self._connected(), piece.pull
        status, epoch, size_bytes = receive_answer(connection)
        if status is OfferStatus.BUSY:
            raise BrokenStreamError(REFUSALS[status])
        if status is not OfferStatus.VALID or epoch != pull.ticket.epoch:
            pull.fail(f"{self._source()} refuses: {REFUSALS.get(status, REFUSALS[OfferStatus.RESTARTED])}")
            return
        if size_bytes != piece.size_bytes:
            raise BrokenStreamError(f"the source sends {size_bytes} bytes, {piece.size_bytes} were requested")
        if not self._enter(pull):
            raise _NotWantedError
        is_valid = False
        try:
            is_valid = self._write(piece, connection)
        finally:
            self._leave()
            if not is_valid:
                pull.left()
        if is_valid:
            pull.landed(piece)

    def _write(self, piece: PullPiece, connection: socket.socket) -> bool:
        """Receive a piece. Return False if its bytes are not valid; then the pull has failed."""
        end = bytearray(TRAILER_BYTES)
        try:
            received = _receive_bytes(piece, connection, memoryview(end))
        except TransferError as error:
            piece.pull.fail(f"{piece.size_bytes} bytes at {piece.start} could not be written: {error}")
            raise _NotWantedError from error
        status, sent = read_trailer(end)
        if status is not OfferStatus.VALID:
            piece.pull.fail(f"{self._source()} ended the offer during the pull: {REFUSALS[OfferStatus.ENDED]}")
            return False
        if piece.pull.ticket.checksum and received != sent:
            piece.pull.fail(
                f"{piece.size_bytes} bytes at {piece.start} from {self._source()} were damaged on the way: sent with"
                f" checksum {sent:016x}, received with {received:016x}; pull again, and look at the network and memory"
            )
            return False
        return True

    def _enter(self, pull: PiecewisePull) -> bool:
        with self._lock:
            if not pull.begin():
                return False
            self._writing_for = pull
            return True

    def _leave(self) -> None:
        with self._lock:
            self._writing_for = None

    def _connected(self) -> socket.socket:
        if self._connection is not None:
            return self._connection
        limits = self._peer.limits
        connection = self._peer.dialer.connect(limits.connect_s)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_waits(connection, receive_s=limits.connect_s, send_s=limits.connect_s)
        fit_buffers(connection)
        connection = self._peer.protection.connect(connection)
        limit_waits(connection, receive_s=limits.stall_s, send_s=limits.stall_s)
        with self._lock:
            self._connection = connection
            if self._closed:
                hang_up(connection)
        return connection

    def _disconnect(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            self._interrupted = False
        if connection is not None:
            connection.close()

    def _recover(self, error: OSError | ValueError) -> None:
        """Disconnect, return the requested pieces to the queue, and pause. A break by this side is not counted."""
        is_own = self._interrupted or isinstance(error, _NotWantedError)
        self._disconnect()
        pieces = [piece for piece in self._requested if piece.pull.wanted]
        self._requested.clear()
        if isinstance(error, WrongSecretError):
            for piece in pieces:
                piece.pull.fail(f"{self._source()} sends no KV to this host: {error}")
        elif not is_own:
            self._count_break(pieces, error)
        self._peer.requeue(reversed([piece for piece in pieces if piece.pull.wanted]))
        if not is_own:
            self._breaks += 1
            self._peer.pause(self._peer.limits.backoff.pause_s(self._breaks))

    def _count_break(self, pieces: list[PullPiece], error: OSError | ValueError) -> None:
        for piece in pieces:
            piece.breaks += 1
            if piece.breaks > self._peer.limits.breaks_max:
                piece.pull.fail(
                    f"the connection to {self._source()} broke {piece.breaks} times during one piece,"
                    f" at most {piece.breaks - 1} are allowed: {error or type(error).__name__};"
                    " see whether that host is up"
                )

    def _source(self) -> str:
        host, port = self._peer.address
        return f"the source at {host}:{port}"


def _receive_bytes(piece: PullPiece, connection: socket.socket, end: memoryview) -> int:
    """Receive a piece into the target's memory, and the trailer after it into `end`.

    Return the checksum of the bytes if the ticket requests one; otherwise the value has no meaning.
    """
    target, left_bytes, state = piece.pull.target, piece.size_bytes, xxhash.xxh3_64()
    with closing(target.write(piece.start, left_bytes, target.portion_bytes(left_bytes))) as portions:
        for views in portions:
            left_bytes -= sum(view.nbytes for view in views)
            receive_views(connection, views if left_bytes else [*views, end])
            if piece.pull.ticket.checksum:
                for view in views:
                    state.update(view)
    return state.intdigest()


def _refusal(connection: socket.socket) -> OSError | None:
    """Return the error if the source has refused the connection before it read the request."""
    try:
        status, _, _ = receive_answer(connection)
    except OSError:
        return None
    if status is OfferStatus.OTHER_PROTECTION:
        return WrongSecretError(REFUSALS[status])
    return BrokenStreamError(REFUSALS[status]) if status is OfferStatus.BUSY else None


class _NotWantedError(BrokenStreamError):
    """The source sends bytes of a pull that has ended: the connection must be closed."""
