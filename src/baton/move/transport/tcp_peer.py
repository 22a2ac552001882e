"""The side that receives: a few connections to one source, which share the pieces of all pulls from it."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import closing

import xxhash
from msgspec import Struct

from baton.core.errors import TransferError
from baton.move.ipc.connections import hang_up, limit_waits
from baton.move.transport.listener import fit_buffers
from baton.move.transport.offers import REFUSALS, Answer
from baton.move.transport.pulling import BUG, CLOSED, Piece, PiecewisePull
from baton.move.transport.wire import (
    TRAILER_BYTES,
    BrokenStreamError,
    Verb,
    read_trailer,
    receive_answer,
    receive_views,
    request_of,
)

_ASKED_MAX = 2
"""Pieces that one connection has asked for: the next one is on its way while one comes in."""


class TcpLimits(Struct, frozen=True, kw_only=True):
    """How a consumer uses its connections."""

    streams: int = 4
    """Connections to one source, at most."""
    piece_bytes: int = 4 << 20
    """What is asked for at once, and asked for again where a connection breaks."""
    connect_s: float = 5.0
    stall_s: float = 15.0
    """A connection on which nothing comes for so long is broken."""
    breaks_max: int = 4
    """Connections that may break under one piece; then its pull fails."""
    pause_s: float = 0.05
    """Before a broken connection is made again; doubled each time."""
    idle_s: float = 30.0
    """After which a connection without work is closed."""
    connections_max: int = 512
    """Of consumers, to us."""


class Peer:
    """What is wanted from one source. Connections are made when there is work, and closed when there is none."""

    def __init__(self, address: tuple[str, int], limits: TcpLimits) -> None:
        self.address = address
        self.limits = limits
        self._changed = threading.Condition()
        self._wanted: deque[Piece] = deque()
        self._streams: dict[Stream, threading.Thread] = {}
        self._idle = 0
        self._closed = False

    def add(self, pieces: Iterable[Piece]) -> None:
        """Put pieces in line, and see that somebody takes them."""
        why = CLOSED
        with self._changed:
            self._wanted.extend(pieces)
            missing = min(len(self._wanted) - self._idle, self.limits.streams - len(self._streams))
            for _ in range(0 if self._closed else missing):
                stream = Stream(self)
                thread = threading.Thread(target=stream.run, name="baton-pull", daemon=True)
                self._streams[stream] = thread
                try:
                    thread.start()
                except RuntimeError as error:
                    del self._streams[stream]
                    why = f"no thread can be started that receives: {error}"
                    break
            self._changed.notify_all()
        self._refuse_when_deserted(why)

    def take(self, stream: Stream, *, patient: bool) -> Piece | None:
        """Give a stream its next piece. None: there is none now; a patient stream that gets none has to end."""
        with self._changed:
            if patient:
                self._idle += 1
                self._changed.wait_for(lambda: self._closed or self._drop_unwanted(), self.limits.idle_s)
                self._idle -= 1
            if not self._closed and self._drop_unwanted():
                return self._wanted.popleft()
            if patient:
                del self._streams[stream]
            return None

    def again(self, pieces: Iterable[Piece]) -> None:
        """Take back what a stream has not delivered, to be served first."""
        with self._changed:
            self._wanted.extendleft(pieces)
            self._changed.notify_all()
        self._refuse_when_deserted()

    def lose(self, stream: Stream, pieces: Iterable[Piece]) -> None:
        """A bug has ended a stream. What it had asked for fails; others go on with the rest, if there are any."""
        with self._changed:
            self._streams.pop(stream, None)
        for piece in pieces:
            piece.pull.fail(BUG)
        self._refuse_when_deserted(BUG)

    def pause(self, pause_s: float) -> None:
        """Wait, unless all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, pause_s)

    def interrupt(self, pull: PiecewisePull) -> None:
        """Break the connections that write for this pull."""
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.interrupt(pull)

    def close(self) -> None:
        """Hang up. Returns when no thread is left."""
        with self._changed:
            self._closed = True
            streams = dict(self._streams)
            self._changed.notify_all()
        self._refuse_when_deserted()
        for stream, thread in streams.items():
            stream.close()
            thread.join()

    @property
    def unused(self) -> bool:
        """There is neither work nor a connection."""
        with self._changed:
            return not self._streams and not self._wanted

    def _refuse_when_deserted(self, why: str = CLOSED) -> None:
        """Fail what is in line where nobody takes it."""
        with self._changed:
            refused = list(self._wanted) if self._closed or not self._streams else []
            if refused:
                self._wanted.clear()
        for piece in refused:
            piece.pull.fail(why)

    def _drop_unwanted(self) -> bool:
        while self._wanted and not self._wanted[0].pull.wanted:
            self._wanted.popleft()
        return bool(self._wanted)


class Stream:
    """One connection and the thread that receives from it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._writing_for: PiecewisePull | None = None
        self._interrupted = False
        self._closed = False
        self._breaks = 0
        """Since the last piece that landed."""
        self._asked: deque[Piece] = deque()

    def run(self) -> None:
        """Fetch pieces until there are none for long. A bug ends what was asked for, and nothing else."""
        is_over = False
        try:
            self._serve()
            is_over = True
        finally:
            self._disconnect()
            if not is_over:
                self._peer.lose(self, self._asked)

    def _serve(self) -> None:
        while True:
            try:
                if not self._ask():
                    return
                self._fetch(self._asked[0])
                self._asked.popleft()
                self._breaks = 0
            except (OSError, ValueError) as error:  # a name that is no name is a ValueError
                self._recover(error)

    def interrupt(self, pull: PiecewisePull) -> None:
        """Break the connection if it writes for this pull now."""
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

    def _ask(self) -> bool:
        """Ask for pieces as far ahead as is good. False: there is nothing to do."""
        while len(self._asked) < _ASKED_MAX:
            piece = self._peer.take(self, patient=not self._asked)
            if piece is None:
                break
            self._asked.append(piece)
            pull = piece.pull
            request = request_of(pull.ticket, Verb.READ, pull.target.size_bytes, piece.start, piece.size_bytes)
            connection = self._connected()
            try:
                connection.sendall(request.packed())
            except OSError as error:
                raise _last_words(connection) or error from error
        return bool(self._asked)

    def _fetch(self, piece: Piece) -> None:
        connection, pull = self._connected(), piece.pull
        answer, epoch, size_bytes = receive_answer(connection)
        if answer is Answer.BUSY:
            raise BrokenStreamError(REFUSALS[answer])
        if answer is not Answer.FINE or epoch != pull.ticket.epoch:
            pull.fail(f"{self._source()} refuses: {REFUSALS.get(answer, REFUSALS[Answer.RESTARTED])}")
            return
        if size_bytes != piece.size_bytes:
            raise BrokenStreamError(f"the source sends {size_bytes} bytes, {piece.size_bytes} were asked for")
        if not self._enter(pull):
            raise _NotWantedError
        stood = False
        try:
            stood = self._write(piece, connection)
        finally:
            self._leave()
            if not stood:
                pull.left()
        if stood:
            pull.landed(piece)

    def _write(self, piece: Piece, connection: socket.socket) -> bool:
        """Receive a piece. False: it is not to be trusted, and the pull has failed."""
        end = bytearray(TRAILER_BYTES)
        try:
            received = _receive_bytes(piece, connection, memoryview(end))
        except TransferError as error:
            piece.pull.fail(f"{piece.size_bytes} bytes at {piece.start} could not be written: {error}")
            raise _NotWantedError from error
        answer, sent = read_trailer(end)
        if answer is not Answer.FINE:
            piece.pull.fail(f"{self._source()} ended the offer under the pull: {REFUSALS[Answer.ENDED]}")
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
        connection = socket.create_connection(self._peer.address, limits.connect_s)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_waits(connection, receive_s=limits.stall_s, send_s=limits.stall_s)
        fit_buffers(connection)
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
        """Give back what was asked for, and come again after a while: at most so often for one piece."""
        ours = self._interrupted or isinstance(error, _NotWantedError)
        self._disconnect()
        pieces = [piece for piece in self._asked if piece.pull.wanted]
        self._asked.clear()
        if not ours:
            self._count_break(pieces, error)
        self._peer.again(reversed([piece for piece in pieces if piece.pull.wanted]))
        if not ours:
            self._peer.pause(self._peer.limits.pause_s * 2 ** min(self._breaks, self._peer.limits.breaks_max))
            self._breaks += 1

    def _count_break(self, pieces: list[Piece], error: OSError | ValueError) -> None:
        for piece in pieces:
            piece.breaks += 1
            if piece.breaks > self._peer.limits.breaks_max:
                piece.pull.fail(
                    f"the way to {self._source()} broke {piece.breaks} times under one piece, {piece.breaks - 1} may:"
                    f" {error or type(error).__name__}; see whether that host is up"
                )

    def _source(self) -> str:
        host, port = self._peer.address
        return f"the source at {host}:{port}"


def _receive_bytes(piece: Piece, connection: socket.socket, end: memoryview) -> int:
    """Receive a piece to where it belongs, and the trailer behind it. Returns the checksum, where one was sent."""
    target, left_bytes, state = piece.pull.target, piece.size_bytes, xxhash.xxh3_64()
    with closing(target.write(piece.start, left_bytes, target.portion_bytes(left_bytes))) as portions:
        for views in portions:
            left_bytes -= sum(view.nbytes for view in views)
            receive_views(connection, views if left_bytes else [*views, end])
            if piece.pull.ticket.checksum:
                for view in views:
                    state.update(view)
    return state.intdigest()


def _last_words(connection: socket.socket) -> BrokenStreamError | None:
    """A source that has no room for us says so before it hangs up, perhaps while we are still talking."""
    try:
        answer, _, _ = receive_answer(connection)
    except OSError:
        return None
    return BrokenStreamError(REFUSALS[answer]) if answer is Answer.BUSY else None


class _NotWantedError(BrokenStreamError):
    """Bytes come for a pull that has ended: the connection has to go."""
