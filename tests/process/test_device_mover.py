"""Movers of hosts with arenas on a GPU: KV between them, to hosts without a GPU and back, and into tiers.

The driver is `tests/data/fake_cuda.c`, which stands for libcuda alone: the processes and all else are the real ones.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from baton.core.kv_config import TierConfig
from baton.core.tier_messages import BlocksKept, LoadBlocks, LoadEnded, StoreBlocks
from baton.core.types import BlockHash, BlockId, HostId, RequestId
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import CudaArena, create_cuda_arena
from baton.move.arena.cuda_driver import CudaDriver
from baton.move.arena.memfd import Arena, create_arena
from baton.move.arena.opening import places_of
from baton.move.ipc.frames import ControlReader, ControlWriter
from baton.move.transport.port import Ticket
from baton.serve.messages.moving import (
    BlocksOffered,
    BlocksWithdrawn,
    CopySpec,
    FromMoverMessage,
    MoverFailed,
    MoverReady,
    MoverSetup,
    OfferBlocks,
    PullBlocks,
    PullEnded,
    ToMoverMessage,
    WithdrawBlocks,
)
from tests.fake_cuda import build

BLOCKS = 12
WHOLE = KVLayout(layers=4, kv_heads=4, head_dim=64, block_tokens=16, dtype="float32")
SHARED = msgspec.structs.replace(WHOLE, tensor_parallel=2)
HALVES = msgspec.structs.replace(WHOLE, block_tokens=8)
BYTES = BLOCKS * WHOLE.block_bytes
Wanted = TypeVar("Wanted", bound=FromMoverMessage)


class MoverProcess:
    """A mover process and its arena."""

    def __init__(self, folder: Path, arena: Arena | CudaArena, layout: KVLayout, **more: object) -> None:
        self.arena, self.layout = arena, layout
        self._decoder, self._reader = msgspec.msgpack.Decoder(FromMoverMessage), ControlReader()
        self._writer = ControlWriter()
        self._come: list[bytes] = []
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "baton.serve.host.mover", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
            )
        setup = MoverSetup(
            host=HostId("a"),
            arena_bytes=arena.bytes_total,
            device="cuda:0" if isinstance(arena, CudaArena) else "cpu",
            layout=layout,
            listen="127.0.0.1",
            advertise="",
            **({"transports": ("shm", "tcp")} | more),  # type: ignore[arg-type]
        )
        socket.send_fds(self._sock, [self._writer.frame(msgspec.msgpack.encode(setup))], [arena.fd])

    def put(self, message: ToMoverMessage) -> None:
        self._sock.sendall(self._writer.frame(msgspec.msgpack.encode(message)))

    def next(self, kind: type[Wanted]) -> Wanted:
        self._sock.settimeout(60)
        while not self._come:
            self._come += self._reader.feed(self._sock.recv(1 << 20))
        message = self._decoder.decode(self._come.pop(0))
        assert isinstance(message, kind), message
        return message

    def fill(self, seed: int) -> bytes:
        content = random.Random(seed).randbytes(BYTES)
        if isinstance(self.arena, CudaArena):
            for address, view in self._runs(bytearray(content)):
                ctypes.memmove(address, bytes(view), view.nbytes)
        else:
            self.arena.memory[:] = content
        return content

    def content(self) -> bytes:
        if isinstance(self.arena, CudaArena):
            content = bytearray(BYTES)
            for address, view in self._runs(content):
                view[:] = ctypes.string_at(address, view.nbytes)
            return bytes(content)
        return bytes(self.arena.memory)

    def _runs(self, content: bytearray) -> Iterator[tuple[int, memoryview]]:
        """Return the place of each rank's part of every block."""
        assert isinstance(self.arena, CudaArena)
        for part, shard in zip(self.arena.parts, self.layout.shards, strict=True):
            for block in range(BYTES // self.layout.block_bytes):
                first = block * self.layout.block_bytes + shard.offset_bytes
                yield (
                    part.array.address + block * shard.size_bytes,
                    memoryview(content)[first : first + shard.size_bytes],
                )

    def end(self) -> None:
        self._sock.close()
        self.process.kill()
        self.process.wait()
        self.arena.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(build(tmp_path_factory.mktemp("cuda"))).parent


class Movers:
    """Start movers by the device of their arena."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self._folder, self._opened = folder, opened

    def start(self, where: str, layout: KVLayout = WHOLE, **more: object) -> MoverProcess:
        if where == "gpu":
            library = str(self._folder / "libcuda.so.1")
            drivers = [CudaDriver(rank, library) for rank in range(layout.ranks)]
            arena: Arena | CudaArena = create_cuda_arena(places_of(drivers, layout, BYTES // layout.block_bytes))
        else:
            arena = create_arena(BYTES)
        mover = MoverProcess(self._folder, arena, layout, **more)
        self._opened.callback(mover.end)
        return mover


@pytest.fixture
def movers(folder: Path) -> Iterator[Movers]:
    with ExitStack() as opened:
        yield Movers(folder, opened)


def spec(source: MoverProcess, target: MoverProcess, read: range, write: range) -> CopySpec:
    return CopySpec(
        read=tuple(map(BlockId, read)),
        write=tuple(map(BlockId, write)),
        first_token=0,
        tokens=len(write) * target.layout.block_tokens,
        source=source.layout,
        target=target.layout,
    )


def offer(source: MoverProcess, what: CopySpec) -> Ticket:
    source.put(OfferBlocks(number=1, spec=what, transport="tcp", lease_s=600.0))
    return source.next(BlocksOffered).ticket


@pytest.mark.parametrize("layout", [WHOLE, SHARED], ids=["one GPU", "two GPUs"])
@pytest.mark.parametrize("ways", [("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")], ids=str)
def test_blocks_go_over_and_nothing_beside_them(movers: Movers, ways: tuple[str, str], layout: KVLayout) -> None:
    source, target = (movers.start(way, layout) for way in ways)
    ready = [mover.next(MoverReady) for mover in (source, target)]
    assert [("shm" in each.transports) for each in ready] == [way == "cpu" for way in ways]
    sent, before = source.fill(1), target.fill(2)
    what = spec(source, target, range(2, 9), range(4, 11))
    target.put(PullBlocks(1, offer(source, what), what))
    ended = target.next(PullEnded)
    size = WHOLE.block_bytes
    assert (ended.landed, ended.error, ended.moved_bytes) == (True, "", 7 * size)
    assert target.content() == before[: 4 * size] + sent[2 * size : 9 * size] + before[11 * size :]
    source.put(WithdrawBlocks(1))
    source.next(BlocksWithdrawn)


@pytest.mark.parametrize("layout", [WHOLE, SHARED], ids=["one GPU", "two GPUs"])
def test_kv_is_converted_for_a_device(movers: Movers, layout: KVLayout) -> None:
    """The oracle is a host's arena that pulls from the same source."""
    source = movers.start("gpu", layout)
    device, host = movers.start("gpu", HALVES), movers.start("cpu", HALVES)
    for mover in (source, device, host):
        mover.next(MoverReady)
    source.fill(1)
    assert device.fill(2) == host.fill(2)
    for target in (device, host):
        what = spec(source, target, range(3, 6), range(5, 11))
        target.put(PullBlocks(1, offer(source, what), what))
        assert target.next(PullEnded).error == ""
    assert device.content() == host.content()


def test_the_death_of_a_source_is_told(movers: Movers) -> None:
    source, target = movers.start("gpu"), movers.start("gpu")
    for mover in (source, target):
        mover.next(MoverReady)
    what = spec(source, target, range(12), range(12))
    ticket = offer(source, what)
    source.process.kill()
    source.process.wait()
    target.put(PullBlocks(1, ticket, what))
    ended = target.next(PullEnded)
    assert not ended.landed
    assert "broke 5 times" in ended.error


def test_tiers_keep_blocks_of_a_device(movers: Movers, tmp_path: Path) -> None:
    """A file tier: stored blocks are read into other blocks, after the death of the mover."""
    tiers = (TierConfig(url=f"file://{tmp_path}/kv?bytes={64 * WHOLE.block_bytes}"),)
    names = tuple(BlockHash(b"%016d" % number) for number in range(5))
    first = movers.start("gpu", tiers=tiers, fingerprint="f")
    tier = first.next(MoverReady).tiers[0].name
    sent = first.fill(1)
    first.put(StoreBlocks(1, HostId("a"), tier, names, tuple(map(BlockId, range(2, 7)))))
    assert first.next(BlocksKept) == BlocksKept(1, (True,) * 5)
    first.process.kill()
    first.process.wait()
    second = movers.start("gpu", tiers=tiers, fingerprint="f")
    second.next(MoverReady)
    before = second.fill(2)
    second.put(LoadBlocks(RequestId("r"), 2, HostId("a"), (tier,) * 5, names, tuple(map(BlockId, range(4, 9)))))
    assert second.next(LoadEnded).whole == (True,) * 5
    size = WHOLE.block_bytes
    assert second.content() == before[: 4 * size] + sent[2 * size : 7 * size] + before[9 * size :]


def test_a_host_on_a_gpu_without_tcp_says_what_to_do(movers: Movers) -> None:
    failed = movers.start("gpu", transports=("shm",)).next(MoverFailed)
    assert "hosts.transports is shm, and this arena on a GPU needs tcp; add it" in failed.reason
