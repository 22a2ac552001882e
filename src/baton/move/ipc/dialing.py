"""Connect to another machine within a time limit that includes the resolution of its name."""

from __future__ import annotations

import ipaddress
import socket
import threading
from concurrent.futures import Future

from baton.move.clock import now_s

_CONNECT_S_MIN = 0.001


class Dialer:
    """Connects to one address. Thread-safe.

    The system's resolver may take tens of seconds, and no caller can interrupt it. So a thread of its own resolves the
    name, and callers wait for that thread no longer than their limit. There is at most one such thread at a time.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._resolving: Future[list[str]] | None = None

    def connect(self, limit_s: float) -> socket.socket:
        """Return a connection. Raises OSError if there is none within `limit_s`."""
        until_s = now_s() + limit_s
        failure: OSError = ConnectionError(f"the name {self._host} has no address")
        addresses = [self._host] if _is_numeric(self._host) else self._addresses(limit_s)
        for tried, address in enumerate(addresses):
            share_s = (until_s - now_s()) / (len(addresses) - tried)  # a silent address leaves time for the next ones
            try:
                return socket.create_connection((address, self._port), max(_CONNECT_S_MIN, share_s))
            except OSError as error:
                failure = error
        raise failure

    def _addresses(self, limit_s: float) -> list[str]:
        with self._lock:
            if self._resolving is None or self._resolving.done():
                self._resolving = Future()
                thread = threading.Thread(target=self._resolve, args=(self._resolving,), daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    self._resolving = None
                    raise ConnectionError(f"no thread can be started that resolves {self._host}: {error}") from error
            resolving = self._resolving
        try:
            return resolving.result(limit_s)
        except TimeoutError as error:
            message = f"the name {self._host} was not resolved within {limit_s:g} s; see the machine's DNS"
            raise TimeoutError(message) from error

    def _resolve(self, resolving: Future[list[str]]) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            resolving.set_exception(error)
        except ValueError as error:
            resolving.set_exception(ConnectionError(f"{self._host[:100]!r} is no valid name: {error}"))
        else:
            resolving.set_result([str(address[0]) for *_, address in found])


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
