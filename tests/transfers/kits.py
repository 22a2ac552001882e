"""Fixtures of the conformance suite for every transport: two sides, and a gate that holds bytes."""

from __future__ import annotations

import ctypes
import importlib.util
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from baton.move.arena.memfd import Arena, create_arena
from baton.move.clock import now_s as real_now_s
from baton.move.copies import Copy, Moves
from baton.move.transport.nixl import NixlTransport
from baton.move.transport.offers import Source
from baton.move.transport.port import Extent, Ticket, Transport
from baton.move.transport.protection import Protection
from baton.move.transport.shm import ShmTransport
from baton.move.transport.staged import StagedMemory
from baton.move.transport.tcp import TcpTransport
from baton.move.transport.tcp_peer import TcpLimits
from tests.transfers.host_device_memory import HostDeviceMemory
from tests.transfers.memory_transport import MemoryExchange, MemoryTransport
from tests.transfers.wires import Alter, Gate, Proxy

ROOT = Path(__file__).resolve().parent.parent.parent
PIECE_BYTES = 64 << 10
SECRET = b"s" * 32
TRANSPORTS = ("memory", "shm", "tcp", "tcp encrypted", "nixl", "memory staged", "tcp staged", "nixl staged")
"""`staged`: the memories are a device's, copied in portions."""
PORTION_BYTES = 24_000
"""Not a divisor of a piece."""
LANES = 3


@dataclass
class Side:
    """One end: a transport and its registered memory."""

    transport: Transport
    source: Source
    arena: Arena
    region: int

    def fill(self, seed: int) -> bytes:
        """Fill the memory with random bytes and return them."""
        content = random.Random(seed).randbytes(self.arena.bytes_total)
        self.arena.memory[:] = content
        return content

    def content(self) -> bytes:
        return bytes(self.arena.memory)

    def read(self, extents: Sequence[Extent]) -> bytes:
        memory = self.arena.memory
        return b"".join(memory[e.offset_bytes : e.offset_bytes + e.size_bytes] for e in extents)

    def whole(self) -> list[Extent]:
        return [Extent(0, self.arena.bytes_total, self.region)]


class RemoteSide:
    """A source in another process, which offers its whole memory."""

    def __init__(self, process: subprocess.Popen[bytes], ticket: Ticket) -> None:
        self.process = process
        self.ticket = ticket

    def say(self, words: str) -> None:
        """Send a command (see `source_process`), and wait until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(words.encode() + b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"done\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Kit:
    """One transport under test. Everything that it has made is closed at the end."""

    name: str
    staged: bool = False
    encrypted: bool = False
    opened: ExitStack = field(default_factory=ExitStack)
    proxies: ExitStack = field(default_factory=ExitStack)
    exchange: MemoryExchange = field(default_factory=MemoryExchange)

    @property
    def crosses(self) -> bool:
        """It moves bytes between processes."""
        return self.name != "memory"

    @property
    def holds(self) -> bool:
        """A gate can hold its bytes."""
        return self.name != "nixl"

    def side(
        self, size_bytes: int = 1 << 20, *, gate: Gate | None = None, now_s: Callable[[], float] = real_now_s
    ) -> Side:
        source = Source(now_s)
        transport = self._open(gate, source)
        arena = create_arena(size_bytes)
        self.opened.callback(arena.close)
        self.opened.callback(source.close)
        self.opened.callback(transport.close)
        return Side(transport, source, arena, register(transport, arena, self.staged))

    def _open(self, gate: Gate | None, source: Source) -> Transport:
        copy = None if gate is None else held_copy(gate)
        match self.name:
            case "memory":
                return MemoryTransport(self.exchange, copy=copy, source=source)
            case "shm":
                return ShmTransport(copy=copy, source=source)
            case name:
                return transport_of(name, source, encrypted=self.encrypted)

    def through(self, ticket: Ticket, gate: Gate) -> Ticket:
        """Return a ticket whose bytes pass the gate: by a proxy, or in the target's copies."""
        return self.proxied(ticket, gate=gate)[1] if self.name == "tcp" else ticket

    def through_ended(self) -> None:
        """Take the proxies away."""
        self.proxies.close()

    def proxied(self, ticket: Ticket, *, gate: Gate | None = None, alter: Alter | None = None) -> tuple[Proxy, Ticket]:
        proxy = self.proxies.enter_context(Proxy(ticket.address, gate=gate, alter=alter))
        return proxy, msgspec.structs.replace(ticket, address=proxy.address)

    def remote(self, seed: int, size_bytes: int, *, listen: str = "") -> RemoteSide:
        module = ["-m", "tests.transfers.source_process"]
        ways = ["staged"] * self.staged + ["encrypted"] * self.encrypted
        name = " ".join([self.name, *ways])
        command = [sys.executable, *module, name, str(seed), str(size_bytes), listen]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.opened.callback(end, process)
        assert process.stdout is not None
        return RemoteSide(process, msgspec.json.decode(process.stdout.readline(), type=Ticket))


def register(transport: Transport, arena: Arena, staged: bool) -> int:
    """Register an arena, as host memory or as device memory."""
    if not staged:
        return transport.register(arena.memory, descriptor=arena.fd)
    device = HostDeviceMemory(arena.memory)
    return transport.register(StagedMemory(device, portion_bytes=PORTION_BYTES, lanes=LANES))


def transport_of(name: str, source: Source, listen: str = "", *, encrypted: bool = False) -> Transport:
    if name == "shm":
        return ShmTransport(listen.rpartition("/")[2] or None, source=source)
    if name == "nixl":
        return NixlTransport(listen or "127.0.0.1:0", devices="lo", source=source)
    limits = TcpLimits(piece_bytes=PIECE_BYTES, pause_s=0.005)
    protection = Protection(SECRET) if encrypted else None
    return TcpTransport(listen or "127.0.0.1:0", limits=limits, source=source, protection=protection)


def held_copy(gate: Gate) -> Copy:
    """Copy in small steps, each of which passes the gate."""

    def copy(moves: Moves) -> None:
        for source, target, size_bytes in moves.tolist():
            for start in range(0, size_bytes, PIECE_BYTES):
                part_bytes = min(PIECE_BYTES, size_bytes - start)
                gate.pass_bytes(part_bytes)
                ctypes.memmove(target + start, source + start, part_bytes)

    return copy


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@contextmanager
def kit_of(name: str) -> Iterator[Kit]:
    if name.startswith("nixl") and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed: pip install -e '.[nixl]'")
    wire, *ways = name.split()
    kit = Kit(wire, staged="staged" in ways, encrypted="encrypted" in ways)
    with kit.opened, kit.proxies:
        yield kit


def random_extents(rng: random.Random, size_bytes: int, *, total_bytes: int, region: int = 0) -> list[Extent]:
    """Return extents that do not overlap, in random order, of `total_bytes` in all."""
    cuts = sorted(rng.sample(range(1, total_bytes), min(rng.randrange(0, 40), total_bytes - 1)))
    sizes = [after - before for before, after in zip([0, *cuts], [*cuts, total_bytes], strict=True)]
    spare = size_bytes - total_bytes
    gaps = sorted(rng.choices(range(spare + 1), k=len(sizes)))
    if rng.random() < 0.3:
        gaps = [0] * len(sizes)
    extents, offset = [], 0
    for gap, size in zip(gaps, sizes, strict=True):
        extents.append(Extent(gap + offset, size, region))
        offset += size
    if rng.random() < 0.7:
        rng.shuffle(extents)
    return extents


def offered(source: Side, seed: int = 1, **more: object) -> tuple[Ticket, bytes]:
    content = source.fill(seed)
    return source.transport.offer(source.whole(), lease_s=600.0, **more), content  # type: ignore[arg-type]


def assert_quiet(source: Side, target: Side, gate: Gate) -> None:
    """Assert that no byte of the target changes after the gate is opened."""
    before = target.content()
    gate.open()
    ticket = source.transport.offer([Extent(0, 1, source.region)], lease_s=600.0)
    target.transport.pull(ticket, [Extent(0, 1, target.region)]).wait(60)
    assert target.content()[1:] == before[1:]
