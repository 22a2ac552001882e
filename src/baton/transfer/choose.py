"""Which transport: by name, or for each pull the one that fits the way between the two."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from baton.core.errors import TransferError
from baton.machine.lending import sealed_file
from baton.transfer.nixl import NixlTransport
from baton.transfer.offers import Source
from baton.transfer.port import Extent, Memory, Pull, Ticket, Transport
from baton.transfer.shm import ShmTransport
from baton.transfer.tcp import TcpTransport
from baton.transfer.tcp_peer import TcpLimits

TransportName = Literal["auto", "shm", "tcp", "nixl"]

_TEST_BYTES = 4096
_WAYS_MAX = 4096
_TEST_S = 10.0


def open_transport(
    name: TransportName, listen: str, *, advertise: str | None = None, limits: TcpLimits | None = None
) -> Transport:
    """Open a transport that listens on `host:port`. Raises TransferError where it cannot, or fails its self-test.

    `auto` goes through shared memory to those on this machine, and over tcp to all others.
    """
    match name:
        case "shm":
            self_test(ShmTransport)
            return ShmTransport()
        case "tcp":
            return TcpTransport(listen, advertise=advertise, limits=limits)
        case "nixl":
            self_test(lambda: NixlTransport(listen))
            return NixlTransport(listen)
        case "auto":
            return AutoTransport(listen, advertise=advertise, limits=limits, shared=works(ShmTransport))


class AutoTransport:
    """Implements `Transport`. Tries shared memory where source and consumer share a machine; tcp goes everywhere."""

    name = "auto"

    def __init__(
        self,
        listen: str,
        *,
        advertise: str | None = None,
        limits: TcpLimits | None = None,
        shared: bool = True,
    ) -> None:
        """`shared` False: tcp only, though tickets of others may name both ways."""
        self._source = Source()
        self._far = TcpTransport(listen, advertise=advertise, limits=limits, source=self._source)
        self._near = ShmTransport(source=self._source) if shared else None
        self._ways: dict[str, bool] = {}
        """Whether a source lends us its memory, by its address."""

    @property
    def address(self) -> str:
        """Where our offers are answered: `host:port`, and the name on this machine behind a blank."""
        return f"{self._far.address} {self._near.address}" if self._near else self._far.address

    def register(self, memory: Memory, *, descriptor: int | None = None) -> int:
        """See `Transport.register`."""
        return self._source.register(memory, descriptor=descriptor)

    def offer(self, extents: Sequence[Extent], *, lease_s: float, checksum: bool = False) -> Ticket:
        """See `Transport.offer`. What was registered without a descriptor goes over tcp, on one machine too."""
        mapped = all(extent.region in self._source.descriptors for extent in extents)
        address = self.address if mapped else self._far.address
        return self._source.offers.add(
            extents, lease_s=lease_s, checksum=checksum, transport=self.name, address=address
        )

    def withdraw(self, ticket: Ticket) -> None:
        """See `Transport.withdraw`."""
        self._source.offers.withdraw(ticket)

    def pull(self, ticket: Ticket, into: Sequence[Extent]) -> Pull:
        """See `Transport.pull`. Takes tickets of the two transports below it too."""
        if ticket.transport != self.name:
            way = self._near if self._near is not None and ticket.transport == self._near.name else self._far
            return way.pull(ticket, into)
        far, _, near = ticket.address.partition(" ")
        if self._near is not None and near and self.is_near(near):
            return self._near.pull(msgspec.structs.replace(ticket, transport="shm", address=near), into)
        return self._far.pull(msgspec.structs.replace(ticket, transport="tcp", address=far), into)

    def is_near(self, address: str) -> bool:
        """Tell whether a source lends us its memory. Tried once for each source."""
        if address not in self._ways:
            if len(self._ways) >= _WAYS_MAX:
                self._ways.clear()
            self._ways[address] = self._near is not None and self._near.reaches(address)
        return self._ways[address]

    def close(self) -> None:
        """See `Transport.close`."""
        if self._near is not None:
            self._near.close()
        self._far.close()
        self._source.close()


def works(make: Callable[[], Transport]) -> bool:
    """Tell whether a transport passes its self-test here."""
    try:
        self_test(make)
    except TransferError:
        return False
    return True


def self_test(make: Callable[[], Transport]) -> None:
    """Move a few bytes between two transports of a kind. Raises TransferError where they do not arrive."""
    source, target = make(), make()
    received = mmap.mmap(-1, _TEST_BYTES)
    try:
        descriptor, sent = _sealed_memory()
        try:
            sent[:] = bytes(range(256)) * (_TEST_BYTES // 256)
            region = source.register(memoryview(sent), descriptor=descriptor)
            ticket = source.offer([Extent(1000, 3000, region), Extent(0, 1000, region)], lease_s=_TEST_S)
            into = target.register(memoryview(received))
            target.pull(ticket, [Extent(1096, 3000, into), Extent(0, 1000, into)]).wait(_TEST_S)
            if received[1096:] + received[:1000] != sent[1000:4000] + sent[:1000]:
                raise TransferError(f"{source.name} moved other bytes than were offered; choose another transport")
        finally:
            os.close(descriptor)
    finally:
        target.close()
        source.close()


def _sealed_memory() -> tuple[int, mmap.mmap]:
    """A little memory that other processes may map."""
    try:
        descriptor = sealed_file("baton-test", _TEST_BYTES)
    except (AttributeError, OSError) as error:
        raise TransferError(f"this system lends no memory between processes: {error}; use tcp") from error
    return descriptor, mmap.mmap(descriptor, _TEST_BYTES)
