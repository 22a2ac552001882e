"""A wire between hosts and their server that loses, repeats, delays and cuts, for unmodified processes.

A host that joins by `LossyWire.url` reaches every port of the server through the wire: it listens on another address of
the loopback interface.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

import msgspec

from baton.move.ipc.frames import HEAD_BYTES, NUMBER_BYTES, FrameReader, frame

Trouble = Literal["lost", "repeated"]
Direction = Literal["to_server", "from_server"]
DIRECTIONS: tuple[Direction, ...] = ("to_server", "from_server")
ADDRESS, SERVER = "127.0.0.2", "127.0.0.1"
_PIECE_BYTES = 1 << 16


def free_port() -> int:
    """Return a port that is free on the server's address, for `hosts.port`."""
    with socket.create_server((SERVER, 0)) as listening:
        return int(listening.getsockname()[1])


PATIENCE_MESSAGES = 200
"""Messages among which a strike looks for one of a kind that was never struck."""


class LossyWire:
    """Forwards connections to the server. `strike` acts on a control message of a host."""

    def __init__(self, *, http_port: int, hosts_port: int) -> None:
        self.url = f"http://{ADDRESS}:{http_port}"
        self.struck = {"lost": 0, "repeated": 0}
        """Messages that were lost and repeated so far."""
        self.kinds: dict[Trouble, set[str]] = {"lost": set(), "repeated": set()}
        """Kinds of the messages that were lost and repeated so far."""
        self.seen: set[str] = set()
        """Kinds of all messages so far."""
        self.repeats_each_kind = False
        """Repeat the next message of every kind that was not repeated yet."""
        self._changed = threading.Condition()
        self._pending: dict[Direction, tuple[Trouble, int]] = {}
        """For each direction: the trouble to come, and the messages among which it looks for another kind."""
        self._open: set[socket.socket] = set()
        self._held = threading.Event()
        self._held.set()
        self._listening = [socket.create_server((ADDRESS, port)) for port in (http_port, hosts_port)]
        for listening, is_control in zip(self._listening, (False, True), strict=True):
            threading.Thread(target=self._accept, args=(listening, is_control), daemon=True).start()

    def strike(self, what: Trouble, direction: Direction) -> None:
        """Lose or repeat a control message in this direction, and wait until that has happened.

        Kinds of messages that were not struck before come first. Of each such kind, one message is repeated.
        """
        with self._changed:
            goal = self.struck[what] + 1
            self._pending[direction] = what, PATIENCE_MESSAGES
            assert self._changed.wait_for(lambda: self.struck[what] >= goal, 60), "no control message came"

    def cut(self) -> None:
        """Reset every connection. New ones are forwarded."""
        with self._changed:
            for end in self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def delay(self, for_s: float) -> None:
        """Hold all bytes back, in both directions, for this long."""
        self._held.clear()
        threading.Event().wait(for_s)
        self._held.set()

    def close(self) -> None:
        """Cut every connection and forward no more."""
        for listening in self._listening:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        self.cut()

    def _accept(self, listening: socket.socket, is_control: bool) -> None:
        while True:
            try:
                near, _ = listening.accept()
                far = socket.create_connection((SERVER, listening.getsockname()[1]))
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near, far, is_control), daemon=True).start()

    def _serve(self, near: socket.socket, far: socket.socket, is_control: bool) -> None:
        with near, far:
            with self._changed:
                self._open |= {near, far}
            back = threading.Thread(target=self._forward, args=(far, near, "from_server" if is_control else None))
            back.start()
            self._forward(near, far, "to_server" if is_control else None)
            back.join()
            with self._changed:
                self._open -= {near, far}

    def _forward(self, source: socket.socket, target: socket.socket, direction: Direction | None) -> None:
        """Forward one direction of a connection until it ends, then end the other direction too."""
        frames = FrameReader()
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                self._held.wait()
                pieces: Iterable[bytes] = (data,)
                if direction is not None:
                    pieces = [copy for message in frames.feed(data) for copy in self._copies(frame(message), direction)]
                for piece in pieces:
                    target.sendall(piece)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _copies(self, message: bytes, direction: Direction) -> list[bytes]:
        kind = _kind(message)
        with self._changed:
            self.seen.add(kind)
            what, left = self._pending.pop(direction, (None, 0))
            if what is None and self.repeats_each_kind and kind not in self.kinds["repeated"]:
                what, left = "repeated", 1
            if what is None:
                return [message]
            is_struck = left == 1 or kind not in self.kinds[what]
            if left > 1 and not (is_struck and what == "lost"):
                self._pending[direction] = what, left - 1
            if not is_struck:
                return [message]
            self.kinds[what].add(kind)
            self.struck[what] += 1
            self._changed.notify_all()
            return [] if what == "lost" else [message, message]


def _kind(message: bytes) -> str:
    """Return the type of a framed control message, and that of the message inside it."""
    fields = msgspec.msgpack.decode(message[HEAD_BYTES + NUMBER_BYTES :])
    inside = [fields[name] for name in ("order", "event", "command") if name in fields]
    inside += [msgspec.msgpack.decode(fields["payload"])] if "payload" in fields else []
    return "/".join(each["type"] for each in (fields, *inside))
