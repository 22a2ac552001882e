"""Store in a Mooncake Store cluster: its master places blocks in the memory of its clients, and evicts them."""

from __future__ import annotations

import http.client
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.ipc.connections import hang_up, limit_waits
from baton.move.ipc.shared_memory import create_sealed, map_sealed
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.direct_io import copy_bytes
from baton.move.store.mooncake_process import ClientCall, ClientSettings, ClientStarted, receive_payload, send_message
from baton.move.store.port import StoreCounters
from baton.move.store.reachability import Reachability
from baton.move.store.slot_header import HEADER_BYTES, detached_header, matches_header, parse_block_hash

LANES = 4
"""Concurrent calls: a tier writes with one thread and reads with three."""
LANE_BYTES = 16 << 20
"""Staging memory of a lane. It is larger if one block is."""
METRICS_PORT = 9003
"""Mooncake's default."""
START_TIMEOUT_S, ANSWER_TIMEOUT_S, LIST_TIMEOUT_S = 15.0, 4.0, 5.0
PROCESS_SETTINGS = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}
"""Environment of the process. Mooncake's own time limits are 30 s."""
_FOUND, _MISSING = 1, 0
_NO_SPACE, _NOT_READY, _NOT_FOUND, _EXISTS = -200, -703, -704, -705
_UNREACHABLE = (-900, -901)
_READS_MAX = 3

Block = tuple[BlockHash, memoryview]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakePlace:
    """Location of a Mooncake master, and how values are transferred."""

    host: str
    port: int
    metrics_port: int = METRICS_PORT
    """Port of the master's HTTP server, which lists the keys."""
    protocol: str = "tcp"
    devices: str = ""
    local_host: str = ""
    """Address of this machine for other clients. Empty: the one from which the master is reached."""
    prefix: str = "baton"

    @property
    def master(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class MooncakeStore:
    """One value per block: a header with its hash and checksum, then its bytes. Several hosts may share a master."""

    name = "mooncake"
    capacity_blocks: int | None = None

    def __init__(self, place: MooncakePlace, *, layout_fingerprint: str, block_bytes: int) -> None:
        """Start the client's process. Raises StoreError if the package is missing or the master does not answer."""
        self._place = place
        self._layout = fingerprint_digest(layout_fingerprint)
        self._block_bytes = block_bytes
        self._value_bytes = HEADER_BYTES + block_bytes
        self._prefix = f"{place.prefix}:{self._layout.hex()}:"
        self._where = f"mooncake://{place.master}"
        self._lock = threading.Lock()
        self._client: _ClientProcess | None = None
        self._reach = Reachability(self._where, self._ask, (OSError, StoreError))
        try:
            self._ask()
        except OSError as error:
            self.close()
            raise StoreError(f"cannot use {self._where} as a KV store: {error}") from None

    @property
    def counters(self) -> StoreCounters:
        return self._reach.counters

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        new = {block_hash: memory.cast("B") for block_hash, memory in blocks if memory.nbytes == self._block_bytes}
        kept = dict(zip(new, self._each_group(self._put_group, list(new.items())), strict=True))
        answers = [memory.nbytes == self._block_bytes and kept[block_hash] for block_hash, memory in blocks]
        self._reach.count(refused=answers.count(False))
        return answers

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        wanted = [(block_hash, memory.cast("B")) for block_hash, memory in blocks if memory.nbytes == self._block_bytes]
        outcomes = iter(self._each_group(self._get_group, wanted))
        found = [memory.nbytes == self._block_bytes and next(outcomes) for _, memory in blocks]
        self._reach.count(hits=found.count(True), misses=found.count(False))
        return found

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        keys = [self._key(block_hash) for block_hash in dict.fromkeys(hashes)]
        if keys:
            codes = self._call(lambda lane: lane.ask(ClientCall("drop", keys))) or []
            self._reach.count(dropped=codes.count(0))

    def held(self) -> list[BlockHash]:
        """List the blocks of this layout, of all hosts, in no order: the master does not tell their age."""
        host = self._place.master.rpartition(":")[0]
        url = f"http://{host}:{self._place.metrics_port}/get_all_keys"
        try:
            with urllib.request.urlopen(url, timeout=LIST_TIMEOUT_S) as answer:
                keys = answer.read().decode(errors="replace").split()
        except (OSError, http.client.HTTPException) as error:
            raise StoreError(
                f"the Mooncake master does not list its keys at {url}: {error}: set metrics_port in the URL"
            ) from None
        names = (key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix))
        return [block_hash for name in names if (block_hash := parse_block_hash(name)) is not None]

    def close(self) -> None:
        self._reach.close()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.kill()

    def _key(self, block_hash: BlockHash) -> str:
        return self._prefix + block_hash.hex()

    # ---- the client's process

    def _ask(self) -> None:
        """Check that the master answers: look up a key that may be missing. Start the client's process if needed.

        Raises OSError or StoreError.
        """
        with self._lock:
            client = self._client
        if client is None:
            client = _ClientProcess(self._place, self._value_bytes)
            with self._lock:
                self._client = client
        try:
            with client.lane() as lane:
                lane.ask(ClientCall("has", [self._prefix]))
        except OSError:
            self._end(client)
            raise

    def _call(self, call: Callable[[_Lane], T]) -> T | None:
        """Call `call` with an idle lane. Return None if the master or the client's process does not answer."""
        with self._lock:
            client = self._client
        if client is None or not self._reach.is_open:
            return None
        try:
            with client.lane() as lane:
                return call(lane)
        except OSError as error:
            self._end(client)
            self._reach.lost(error)
            return None

    def _end(self, client: _ClientProcess) -> None:
        """End a process that failed: a call that hangs there ends with it. The next probe starts another one."""
        with self._lock:
            if self._client is client:
                self._client = None
        client.kill()

    # ---- groups of blocks that fit into the staging memory of a lane

    def _each_group(self, call: Callable[[_Lane, Sequence[Block]], list[bool]], blocks: list[Block]) -> list[bool]:
        size = max(1, LANE_BYTES // self._value_bytes)
        groups = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        return [
            answer
            for group in groups
            for answer in self._call(lambda lane, group=group: call(lane, group)) or [False] * len(group)
        ]

    def _put_group(self, lane: _Lane, blocks: Sequence[Block]) -> list[bool]:
        found = lane.ask(ClientCall("has", [self._key(block_hash) for block_hash, _ in blocks]))
        new = [block for block, code in zip(blocks, found, strict=True) if code == _MISSING]
        for index, (block_hash, memory) in enumerate(new):
            value = lane.value(index)
            value[:HEADER_BYTES] = detached_header(block_hash, memory, layout=self._layout)
            copy_bytes(value[HEADER_BYTES:], memory)
        codes = iter(lane.move("put", [self._key(block_hash) for block_hash, _ in new]))
        kept = [code == _FOUND or (code == _MISSING and self._was_put(next(codes))) for code in found]
        self._reach.count(put=kept.count(True) - found.count(_FOUND))
        return kept

    def _was_put(self, code: int) -> bool:
        if code not in (0, _EXISTS, _NOT_FOUND):  # other clients put or dropped the block meanwhile
            why = "it is full" if code == _NO_SPACE else "see Mooncake's error codes"
            self._reach.refused(StoreError(f"code {code} for a block of {self._block_bytes} bytes: {why}"))
        return code == 0

    def _get_group(self, lane: _Lane, blocks: Sequence[Block]) -> list[bool]:
        keys = [self._key(block_hash) for block_hash, _ in blocks]
        codes = lane.move("get", keys)
        return [
            self._take(lane, index, block, code) for index, (block, code) in enumerate(zip(blocks, codes, strict=True))
        ]

    def _take(self, lane: _Lane, index: int, block: Block, code: int) -> bool:
        """Verify a value, and copy it out. A value that was dropped while it was read is read again."""
        block_hash, memory = block
        for _ in range(_READS_MAX):
            if code < 0:
                if code not in (_NOT_FOUND, _NOT_READY):
                    self._reach.refused(StoreError(f"code {code} for a read: the client that holds the block is lost"))
                return False
            value = lane.value(index)
            if code == self._value_bytes and matches_header(
                value[:HEADER_BYTES], block_hash, value[HEADER_BYTES:], layout=self._layout
            ):
                copy_bytes(memory, value[HEADER_BYTES:])
                return True
            code = lane.move("get", [self._key(block_hash)], first=index)[0]
        lane.ask(ClientCall("drop", [self._key(block_hash)]))
        self._reach.count(damaged=1)
        return False


class _Lane:
    """A connection to the client's process, with its part of the staging memory."""

    def __init__(self, connection: socket.socket, memory: memoryview, offset: int, value_bytes: int) -> None:
        self.connection = connection
        self._memory = memory
        self._offset = offset
        self._value_bytes = value_bytes

    def value(self, index: int) -> memoryview:
        """Return the memory of one value."""
        return self._memory[index * self._value_bytes : (index + 1) * self._value_bytes]

    def move(self, verb: Literal["put", "get"], keys: list[str], *, first: int = 0) -> list[int]:
        """Put or get values, the first one at index `first`. Return a code for each."""
        offsets = [self._offset + (first + index) * self._value_bytes for index in range(len(keys))]
        return self.ask(ClientCall(verb, keys, offsets, self._value_bytes)) if keys else []

    def ask(self, call: ClientCall) -> list[int]:
        """Return a code for each key. Raises OSError if the process or the master does not answer."""
        send_message(self.connection, call)
        codes = msgspec.msgpack.decode(receive_payload(self.connection), type=list[int])
        lost = [code for code in codes if code in _UNREACHABLE or (call.verb == "has" and code < 0)]
        if lost or len(codes) != len(call.keys):
            raise ConnectionError(f"the Mooncake master does not answer (code {lost[0] if lost else 'missing'})")
        return codes


class _ClientProcess:
    """A process with Mooncake's client, and its lanes."""

    def __init__(self, place: MooncakePlace, value_bytes: int) -> None:
        """Start it. Raises OSError if it does not connect to the master in time."""
        lane_bytes = max(1, LANE_BYTES // value_bytes) * value_bytes
        pairs = [socket.socketpair() for _ in range(LANES)]
        staging = create_sealed("baton-mooncake", LANES * lane_bytes)
        try:
            memory = map_sealed(staging, mmap.PROT_READ | mmap.PROT_WRITE)
            settings = ClientSettings(
                master=place.master,
                local_host=place.local_host or _own_address(place.host, place.port),
                protocol=place.protocol,
                devices=place.devices,
                staging_fd=staging,
                lanes=tuple(theirs.fileno() for _, theirs in pairs),
            )
            self._process = _start(settings)
        except OSError:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            os.close(staging)
            for _, theirs in pairs:
                theirs.close()
        self._connections = [ours for ours, _ in pairs]
        self._lock = threading.Lock()
        self._is_over = False
        self._idle: queue.LifoQueue[_Lane] = queue.LifoQueue()
        for index, connection in enumerate(self._connections):
            part = memory[index * lane_bytes : (index + 1) * lane_bytes]
            self._idle.put(_Lane(connection, part, index * lane_bytes, value_bytes))
        try:
            self._await_start()
        except OSError:
            self.kill()
            raise

    def _await_start(self) -> None:
        limit_waits(self._connections[0], receive_s=START_TIMEOUT_S, send_s=ANSWER_TIMEOUT_S)
        try:
            started = msgspec.msgpack.decode(receive_payload(self._connections[0]), type=ClientStarted)
        except ConnectionResetError:
            raise ConnectionError("the process of Mooncake's client ended at its start") from None
        if started.problem:
            raise ConnectionError(started.problem)
        for connection in self._connections:
            limit_waits(connection, receive_s=ANSWER_TIMEOUT_S, send_s=ANSWER_TIMEOUT_S)

    @contextmanager
    def lane(self) -> Iterator[_Lane]:
        """Borrow an idle lane. Raises OSError if none gets idle in time.

        An OSError of the body ends the process: a later call could take the answer of the one that failed for its own.
        """
        try:
            lane = self._idle.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError("every lane to the process of Mooncake's client is busy") from None
        try:
            yield lane
        except OSError:
            self.kill()
            raise
        finally:
            self._give_back(lane)

    def kill(self) -> None:
        """End the process. Calls that wait for it fail at once."""
        self._process.kill()
        for connection in self._connections:
            hang_up(connection)
        self._process.wait()
        with self._lock:
            self._is_over = True
            while not self._idle.empty():
                self._idle.get_nowait().connection.close()

    def _give_back(self, lane: _Lane) -> None:
        with self._lock:
            if self._is_over:
                lane.connection.close()
            else:
                self._idle.put(lane)


def _start(settings: ClientSettings) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "baton.move.store.mooncake_process", msgspec.json.encode(settings).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # Mooncake logs every failed call
        pass_fds=[settings.staging_fd, *settings.lanes],
        env={**os.environ, **PROCESS_SETTINGS},
        start_new_session=True,
    )


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine from which a host is reached. Sends nothing. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
