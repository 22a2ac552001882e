"""Transport between hosts over TCP: several connections, no copy between the registered memory and the kernel."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from baton.core.errors import TransferError
from baton.move.transport.offers import Source
from baton.move.transport.piecewise_pull import CLOSED, PiecewisePull
from baton.move.transport.port import Extent, Memory, Ticket
from baton.move.transport.protection import Protection
from baton.move.transport.tcp_peer import TcpLimits, TcpPeer
from baton.move.transport.tcp_source import serve_reads
from baton.move.transport.wire import listen_for_pulls

_PEERS_MAX = 1024
"""Bound of the sources that are remembered without a connection."""


class TcpTransport:
    """Implements `Transport`. It is the default between hosts."""

    name = "tcp"

    def __init__(
        self,
        listen: str,
        *,
        advertise: str | None = None,
        limits: TcpLimits | None = None,
        source: Source | None = None,
        protection: Protection | None = None,
    ) -> None:
        """Listen on `host:port`; port 0 takes a free one. A client needs a ticket, and the secret of `protection`.

        `protection` None: any client with a ticket can read its offer, and KV is not encrypted.

        `advertise` is the address in tickets, if consumers reach this host by another one. Raises TransferError if
        `listen` is not available.
        """
        self._limits = limits or TcpLimits()
        self._protection = protection or Protection()
        self._owned = source is None
        self._source = source or Source()
        listening = bind_address(listen)
        host, port = listening.getsockname()[:2]
        self.address = advertise or join_address(host, port)
        self._listener = listen_for_pulls(
            listening,
            lambda connection: serve_reads(self._source.offers, connection, self._protection),
            self._limits.connections_max,
        )
        self._lock = threading.Lock()
        self._peers: dict[str, TcpPeer] = {}
        self._closed = False

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        return self._source.register(memory, descriptor=descriptor)

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        return self._source.offer(extents, lease_s=lease_s, checksum=checksum, endpoint=self)

    def withdraw(self, ticket: Ticket) -> None:
        self._source.offers.withdraw(ticket)

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> PiecewisePull:
        target = self._source.memories.target_of(ticket, into, name=self.name)
        peer = self._peer(ticket.address)
        pull = PiecewisePull(ticket, target, interrupt=peer.interrupt)
        peer.add(pull.pieces(self._limits.piece_bytes))
        return pull

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()
        self._listener.close()
        if self._owned:
            self._source.close()

    def _peer(self, address: str) -> TcpPeer:
        with self._lock:
            if self._closed:
                raise TransferError(CLOSED)
            if len(self._peers) >= _PEERS_MAX:
                self._peers = {name: peer for name, peer in self._peers.items() if not peer.is_unused}
            if address not in self._peers:
                self._peers[address] = TcpPeer(split_address(address), self._limits, self._protection)
            return self._peers[address]


def bind_address(address: str) -> socket.socket:
    """Return a socket bound to `host:port`. Raises TransferError if the address is not available."""
    host, port = split_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise TransferError(f"cannot listen on {address} for KV: {error}; choose another address") from error


def split_address(address: str) -> tuple[str, int]:
    """Parse `host:port` or `[host]:port`. Raises TransferError for anything else."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or not host:
        raise TransferError(f"{address!r} is no address; write host:port, or [host]:port for IPv6")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return the text form that `split_address` parses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(address: str, port: int) -> str:
    """Add a port to an address that has none: `10.0.0.1`, `::1`, `[::1]` or a name."""
    host, colon, end = address.rpartition(":")
    is_bare_v6 = address.count(":") > 1 and not address.startswith("[")
    if colon and end.isdecimal() and host and not is_bare_v6:
        return address
    return f"[{address}]:{port}" if is_bare_v6 else f"{address}:{port}"
