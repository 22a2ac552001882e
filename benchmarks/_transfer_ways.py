"""One end of one way to move KV, as a process that is told what to do by benchmarks/transfers.py.

python benchmarks/_transfer_ways.py WAY source|consumer HOST SOURCE_FD TARGET_FD

Reads one JSON object a line and answers with one. All processes map the same two memories, so that ways can be
compared in turn without one pair of memories each. Needs numpy; Baton's ways need Baton, the others their package.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Runs = Sequence[tuple[int, int]]
"""Offsets and sizes, in bytes."""


class Way(Protocol):
    """What both ends do; only one of the methods is called in each process."""

    polls: bool
    """The library asks its source to be called all the time while a pull is under way. Others keep their core."""

    def offer(self, runs: Runs) -> dict[str, Any]: ...

    def pull(self, ticket: dict[str, Any], runs: Runs) -> float:
        """Returns seconds."""
        ...

    def poll(self) -> None: ...


class Memcpy:
    """One plain copy of as many bytes, from the one memory to the other. No other process takes part."""

    polls = False

    def __init__(self, source: np.ndarray, target: np.ndarray) -> None:
        self._source, self._target = source, target

    def offer(self, runs: Runs) -> dict[str, Any]:
        return {"bytes": sum(size for _, size in runs)}

    def pull(self, ticket: dict[str, Any], runs: Runs) -> float:
        size_bytes = ticket["bytes"]
        started_s = time.perf_counter()
        np.copyto(self._target[:size_bytes], self._source[:size_bytes])
        return time.perf_counter() - started_s

    def poll(self) -> None:
        """Nobody calls it."""


class Ours:
    """Baton's transports. Their threads answer."""

    polls = False

    def __init__(self, way: str, role: str, host: str, memory: np.ndarray, descriptor: int) -> None:
        try:
            import msgspec

            from baton.move.transport.nixl import NixlTransport
            from baton.move.transport.port import Extent, Ticket
            from baton.move.transport.protection import Protection
            from baton.move.transport.shm import ShmTransport
            from baton.move.transport.tcp import TcpTransport
            from baton.move.transport.tcp_peer import TcpLimits
        except ImportError as error:
            raise SystemExit(f"{error}: pip install -e .") from error
        self._extent, self._borrowing = Extent, way == "reference"
        self._pack, self._unpack = msgspec.to_builtins, lambda ticket: msgspec.convert(ticket, Ticket)
        if way.startswith(("tcp", "tls")):
            streams = int(way[3:] or TcpLimits().streams)
            protection = Protection(b"benchmark" * 4 if way.startswith("tls") else b"")
            limits = TcpLimits(streams=streams)
            self._transport: Any = TcpTransport(f"{host}:0", limits=limits, protection=protection)
        elif way == "baton-nixl":
            self._transport = NixlTransport(f"{host}:0")
        else:
            self._transport = ShmTransport()
        self._transport.register(memoryview(memory), descriptor=descriptor)
        self._last: Any = None

    def offer(self, runs: Runs) -> dict[str, Any]:
        if self._last is not None:
            self._transport.withdraw(self._last)
        self._last = self._transport.offer([self._extent(*run) for run in runs], lease_s=600.0)
        return self._pack(self._last)

    def pull(self, ticket: dict[str, Any], runs: Runs) -> float:
        made = self._unpack(ticket)
        into = [self._extent(*run) for run in runs]
        started_s = time.perf_counter()
        if self._borrowing:
            with self._transport.borrow(made):
                pass
        else:
            self._transport.pull(made, into).wait()
        return time.perf_counter() - started_s

    def poll(self) -> None:
        """Nobody calls it."""


class Nixl:
    """NIXL with its UCX backend, driven directly. UCX picks the way: shared memory on one host, where not told so."""

    polls = True

    def __init__(self, role: str, memory: np.ndarray) -> None:
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise SystemExit(f"{error}: pip install nixl-cu12") from error
        self._memory = memory
        self._agent = nixl_agent(role, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self._known: str | None = None

    def offer(self, runs: Runs) -> dict[str, Any]:
        agent = self._agent.get_agent_metadata().hex()
        return {"agent": agent, "address": self._memory.ctypes.data, "runs": list(runs)}

    def pull(self, ticket: dict[str, Any], runs: Runs) -> float:
        if self._known is None:
            self._known = self._agent.add_remote_agent(bytes.fromhex(ticket["agent"]))
        theirs, ours = _paired(ticket["runs"], runs)
        started_s = time.perf_counter()
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _table(self._memory.ctypes.data, ours), "DRAM")
        remote = self._agent.prep_xfer_dlist(self._known, _table(ticket["address"], theirs), "DRAM")
        order = np.arange(len(ours), dtype=np.int32)
        transfer = self._agent.make_prepped_xfer("READ", local, order, remote, order, b"done")
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        took_s = time.perf_counter() - started_s
        assert state == "DONE", state
        for each in (transfer, local, remote):
            each.release()
        return took_s

    def poll(self) -> None:
        self._agent.get_new_notifs()


class Mooncake:
    """Mooncake's transfer engine over tcp, driven directly. Its threads answer."""

    polls = False

    def __init__(self, host: str, memory: np.ndarray) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise SystemExit(f"{error}: pip install mooncake-transfer-engine-non-cuda") from error
        self._memory, self._host = memory, host
        self._engine = TransferEngine()
        assert self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(memory.ctypes.data, memory.nbytes) == 0

    def offer(self, runs: Runs) -> dict[str, Any]:
        peer = f"{self._host}:{self._engine.get_rpc_port()}"
        return {"peer": peer, "address": self._memory.ctypes.data, "runs": list(runs)}

    def pull(self, ticket: dict[str, Any], runs: Runs) -> float:
        theirs, ours = _paired(ticket["runs"], runs)
        local, remote = self._memory.ctypes.data, ticket["address"]
        started_s = time.perf_counter()
        code = self._engine.batch_transfer_sync_read(
            ticket["peer"],
            [local + offset for offset, _ in ours],
            [remote + offset for offset, _ in theirs],
            [size for _, size in ours],
        )
        took_s = time.perf_counter() - started_s
        if code != 0:
            raise OSError(f"batch_transfer_sync_read of {len(ours)} pieces says {code}")
        return took_s

    def poll(self) -> None:
        """Nobody calls it."""


def _paired(theirs: Runs, ours: Runs) -> tuple[Runs, Runs]:
    """Peers want pairs of one size. Ours are cut alike in this benchmark."""
    assert [size for _, size in theirs] == [size for _, size in ours]
    return theirs, ours


def _table(address: int, runs: Runs) -> np.ndarray:
    return np.array([[address + offset, size, 0] for offset, size in runs], np.uint64)


def make(way: str, role: str, host: str, source: tuple[int, np.ndarray], target: tuple[int, np.ndarray]) -> Way:
    descriptor, memory = source if role == "source" else target
    match way:
        case "memcpy":
            return Memcpy(source[1], target[1])
        case "nixl" | "nixl-tcp":
            return Nixl(role, memory)
        case "mooncake":
            return Mooncake(host, memory)
        case _:
            return Ours(way, role, host, memory, descriptor)


def main(way_name: str, role: str, host: str, *descriptors: str) -> None:
    memories = [(int(text), _mapped(int(text))) for text in descriptors]
    way = make(way_name, role, host, memories[0], memories[1])
    print(json.dumps({"ready": way_name}), flush=True)
    polling = False
    while True:
        if polling and not select.select([sys.stdin], [], [], 0)[0]:
            way.poll()
            continue
        line = sys.stdin.readline()
        if not line:
            break
        said = json.loads(line)
        polling = way.polls and said["do"] == "poll"
        match said["do"]:
            case "offer":
                answer: dict[str, Any] = way.offer([(a, b) for a, b in said["runs"]])
            case "pull":
                answer = _pulled(way, said["ticket"], [(a, b) for a, b in said["runs"]])
            case _:
                answer = {}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # NIXL's libraries crash in their destructors


def _pulled(way: Way, ticket: dict[str, Any], runs: Runs) -> dict[str, Any]:
    try:
        return {"took_s": way.pull(ticket, runs)}
    except OSError as error:
        return {"failed": str(error)}


def _mapped(descriptor: int) -> np.ndarray:
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED | 0x8000)  # MAP_POPULATE
    return np.frombuffer(memory, np.uint8)


if __name__ == "__main__":
    main(*sys.argv[1:])
