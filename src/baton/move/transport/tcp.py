"""Bytes between hosts over TCP, without a library: several connections, no copy between the memories and the kernel."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from baton.core.errors import TransferError
from baton.move.transport.listener import answering
from baton.move.transport.offers import Source
from baton.move.transport.port import Extent, Memory, Ticket
from baton.move.transport.pulling import CLOSED, PiecewisePull
from baton.move.transport.tcp_peer import Peer, TcpLimits
from baton.move.transport.tcp_source import serve_reads

_PEERS_MAX = 1024
"""Sources that are remembered without a connection to them."""


class TcpTransport:
    """Implements `Transport`. The default between hosts."""

    name = "tcp"

    def __init__(
        self,
        listen: str,
        *,
        advertise: str | None = None,
        limits: TcpLimits | None = None,
        source: Source | None = None,
    ) -> None:
        """Listen on `host:port`; port 0 takes a free one. Whoever reaches it and has a ticket can read the offer.

        `advertise` is what stands in tickets, where consumers reach us by another name. Raises TransferError where
        that address cannot be listened on.
        """
        self._limits = limits or TcpLimits()
        self._owned = source is None
        self._source = source or Source()
        listening = listening_on(listen)
        host, port = listening.getsockname()[:2]
        self.address = advertise or joined(host, port)
        self._listener = answering(
            listening, lambda connection: serve_reads(self._source.offers, connection), self._limits.connections_max
        )
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._closed = False

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        """See `Transport.register`."""
        return self._source.register(memory, descriptor=descriptor)

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        """See `Transport.offer`."""
        return self._source.offer(extents, lease_s=lease_s, checksum=checksum, way=self)

    def withdraw(self, ticket: Ticket) -> None:
        """See `Transport.withdraw`."""
        self._source.offers.withdraw(ticket)

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> PiecewisePull:
        """See `Transport.pull`."""
        target = self._source.memories.target_of(ticket, into, name=self.name)
        peer = self._peer(ticket.address)
        pull = PiecewisePull(ticket, target, interrupt=peer.interrupt)
        peer.add(pull.pieces(self._limits.piece_bytes))
        return pull

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()
        self._listener.close()
        if self._owned:
            self._source.close()

    def _peer(self, address: str) -> Peer:
        with self._lock:
            if self._closed:
                raise TransferError(CLOSED)
            if len(self._peers) >= _PEERS_MAX:
                self._peers = {name: peer for name, peer in self._peers.items() if not peer.unused}
            if address not in self._peers:
                self._peers[address] = Peer(split(address), self._limits)
            return self._peers[address]


def listening_on(address: str) -> socket.socket:
    """Take `host:port`. Raises TransferError where that cannot be."""
    host, port = split(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise TransferError(f"cannot listen on {address} for KV: {error}; choose another address") from error


def split(address: str) -> tuple[str, int]:
    """Read `host:port`, or `[host]:port`. Raises TransferError where it is neither."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or not host:
        raise TransferError(f"{address!r} is no address; write host:port, or [host]:port for IPv6")
    return host.removeprefix("[").removesuffix("]"), int(port)


def joined(host: str, port: int) -> str:
    """Write what `split` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
