"""Count HTTP connections, end those that exceed a deadline, and log refused ones at a bounded rate."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from baton.core.errors import RequestError
from baton.core.limits import LimitsConfig
from baton.move.clock import now_s
from baton.move.memory_limits import trim_heap
from baton.serve.http.wire.errors import ClusterError
from baton.serve.live.recorder import Recorder

LOG_S = 60.0
"""Minimum interval between two log lines about the same kind of refusal."""
SWEEP_S_MAX = 1.0
"""Longest interval between two searches for overdue connections."""
REFUSED_MAX = 64
"""Maximum refused connections that wait for their error response. Further ones are closed without a response."""
RETRY_AFTER_S = 1.0
TRIM_S = 10.0
"""Free memory is returned to the system this often while connections are open, and after the last one has closed."""

log = logging.getLogger("baton.server")


class Connection(Protocol):
    """A connection with deadlines."""

    address: str

    def end_if_overdue(self, now_s: float) -> None:
        """End the connection if one of its deadlines has passed."""
        ...


class Parsing(Protocol):
    """A connection with received data that waits to be parsed."""

    def parse_rest(self) -> None:
        """Parse some of the data, and wait for another turn if there is more."""
        ...


class Connections:
    """All HTTP connections of the server. While there are any, a timer checks their deadlines periodically."""

    def __init__(self, limits: LimitsConfig, recorder: Recorder, *, proxies: Sequence[str] = ()) -> None:
        """`proxies`: addresses with no limit of connections, because a proxy serves many clients."""
        self.limits = limits
        self.proxies = frozenset(proxies)
        self._uncounted = frozenset(map(client_address, proxies))
        self._open: set[Connection] = set()
        self._refused: set[Connection] = set()
        """Open connections that exceed a limit. `connections_max` excludes them, else one address could fill it."""
        self._by_address: Counter[str] = Counter()
        self._parsing: deque[Parsing] = deque()
        """Connections with much data to parse, each once. One parses in each round of the event loop."""
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        times_s = (limits.header_s, limits.body_s, limits.idle_s, limits.send_s)
        self._sweep_s = min(SWEEP_S_MAX, min(times_s) / 4)
        self._trim_s = 0.0
        """Time at which free memory is next returned to the system."""
        self._log = RefusalLog()
        self._recorder = recorder

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> RequestError | None:
        """Add a connection. If it exceeds a limit, return the error with which to answer it."""
        self._open.add(connection)
        self._by_address[connection.address] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)
        error = self._excess(connection)
        if error is not None:
            self._refused.add(connection)
        return error

    def _excess(self, connection: Connection) -> RequestError | None:
        """Return the error for a connection that exceeds a limit. None: it exceeds none."""
        count, count_max = self._by_address[connection.address], self.limits.address_connections_max
        if count > count_max and connection.address not in self._uncounted:
            return _too_many(f"this address has {count} connections", count_max, "address_connections_max", status=429)
        count, count_max = len(self._open) - len(self._refused), self.limits.connections_max
        if count > count_max:
            return _too_many(f"the server has {count} connections", count_max, "connections_max", status=503)
        return None

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._refused.discard(connection)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def may_answer(self, connection: Connection) -> bool:
        """Return False for a refused connection that gets no error response, because `REFUSED_MAX` others wait."""
        return connection not in self._refused or len(self._refused) <= REFUSED_MAX

    def wait_for_turn(self, connection: Parsing) -> None:
        """Let a connection parse more of its data in a later round, after those that wait already."""
        self._parsing.append(connection)
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        try:
            self._parsing.popleft().parse_rest()
        finally:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn) if self._parsing else None

    def note_refused(self, address: str, error: RequestError) -> None:
        """Count a refused connection or request. Log it, unless the same kind of refusal was logged recently."""
        self._recorder.refused(error.status, error.code)
        line = self._log.line(error.code or str(error.status), f"{address}: {error}", now_s())
        if line:
            log.warning("%s", line)

    def _sweep(self) -> None:
        self._timer = None
        moment_s = now_s()
        for connection in list(self._open):
            connection.end_if_overdue(moment_s)
        if moment_s >= self._trim_s or not self._open:
            self._trim_s = moment_s + TRIM_S
            trim_heap()
        if self._open:
            self._timer = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)


class RefusalLog:
    """Limits the log to one line every `LOG_S` seconds for each kind of refusal. The line counts the omitted ones."""

    def __init__(self) -> None:
        self._logged_s: dict[str, float] = {}
        self._since: Counter[str] = Counter()

    def line(self, kind: str, text: str, now_s: float) -> str:
        """Return the line to log. Empty: this kind of refusal was logged less than `LOG_S` seconds ago."""
        logged_s = self._logged_s.get(kind)
        if logged_s is not None and now_s - logged_s < LOG_S:
            self._since[kind] += 1
            return ""
        more = self._since.pop(kind, 0)
        self._logged_s[kind] = now_s
        return f"refused {text}" + (f" ({more} more like it since the last line)" if more else "")


@lru_cache(maxsize=4096)
def client_address(host: str) -> str:
    """Return the address that limits of a peer apply to. For IPv6, it is the /64 network, usually of one client."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def _too_many(what: str, count_max: int, setting: str, *, status: int) -> ClusterError:
    message = f"{what}, at most {count_max} are allowed (limits.{setting}); close some and try again"
    return ClusterError(message, status=status, code="too_many_connections", retry_after_s=RETRY_AFTER_S)
