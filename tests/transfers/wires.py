"""A connection between two transports that a test can hold, cut or damage."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

Alter = Callable[[int, bytearray], None]
Tap = Callable[[bytes], None]


class Gate:
    """Lets a number of bytes pass, then blocks until it is opened."""

    def __init__(self, passing_bytes: int) -> None:
        self._left_bytes = passing_bytes
        self._changed = threading.Condition()
        self._open = False
        self._reached = False

    def pass_bytes(self, size_bytes: int) -> None:
        with self._changed:
            if self._left_bytes <= 0:
                self._reached = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._open)
            self._left_bytes -= size_bytes

    def wait_until_reached(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._reached, 60)

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()


class Proxy:
    """A proxy that passes a TCP source's answers through a gate and may change them."""

    def __init__(
        self, address: str, *, gate: Gate | None = None, alter: Alter | None = None, tap: Tap | None = None
    ) -> None:
        """`tap` sees the bytes of both directions, in the threads of the proxy."""
        host, port = address.rsplit(":", 1)
        self._target = (host, int(port))
        self._gate = gate
        self._alter = alter
        self._tap = tap
        self._passed_bytes = 0
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections = 0
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closed = True
        if self._gate:
            self._gate.open()
        self._end(self._listening)
        self._accepting.join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Break every connection that there is now."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            self._end(each)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            try:
                far = socket.create_connection(self._target, 5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets |= {near, far}
            self._start(lambda near=near, far=far: self._pump(near, far, answers=False))
            self._start(lambda near=near, far=far: self._pump(far, near, answers=True))

    def _pump(self, source: socket.socket, target: socket.socket, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if self._tap:
                    self._tap(bytes(data))
                if answers:
                    if self._gate:
                        self._gate.pass_bytes(len(data))
                    with self._lock:
                        if self._alter:
                            self._alter(self._passed_bytes, data)
                        self._passed_bytes += len(data)
                target.sendall(data)
        self._end(source)
        self._end(target)

    def _end(self, each: socket.socket) -> None:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()
