"""Store on a pool node: blocks are copied through its memory on the same machine, and sent over TCP otherwise."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.cores import usable_cores
from baton.move.ipc.connections import send_views
from baton.move.store import node_wire as wire
from baton.move.store.checksum import PART_BYTES, fingerprint_digest
from baton.move.store.node_link import Block, NodeDialer, NodeLink
from baton.move.store.port import StoreCounters
from baton.move.store.reachability import Reachability

STREAMS = 4
T = TypeVar("T")


class NodeStore:
    """Blocks on one pool node. It holds them in memory only: after a restart they are misses."""

    name = "pool"
    capacity_blocks: int | None = None

    def __init__(
        self,
        address: tuple[str, int],
        *,
        layout_fingerprint: str,
        block_bytes: int,
        streams: int = STREAMS,
        shares_memory: bool = True,
        secret: bytes = b"",
    ) -> None:
        """Connect. `shares_memory=False` uses TCP even if the node would lend its memory. `secret`: the node's secret.

        Raises StoreError if the node does not answer, or keeps blocks of another layout.
        """
        self._where = "pool://{}:{}".format(*address)
        self._block_bytes = block_bytes
        self._streams = streams
        self._threads = ThreadPoolExecutor(streams, thread_name_prefix="baton-pool")
        hello = wire.HELLO.pack(wire.MAGIC, fingerprint_digest(layout_fingerprint), block_bytes)
        shares = min(streams, usable_cores()) if shares_memory else 0
        self._copiers = ThreadPoolExecutor(max(1, shares), thread_name_prefix="baton-pool-copy")
        self._dialer = NodeDialer(address, hello, self._copiers, shares=shares, secret=secret)
        self._idle: queue.LifoQueue[NodeLink] = queue.LifoQueue()
        self._reach = Reachability(self._where, self._ask, (OSError, StoreError))
        try:
            self._ask()
        except OSError as error:
            other = ", or it is of another version of Baton" if isinstance(error, ConnectionResetError) else ""
            what_to_do = f"start it with baton pool{other}"
            raise StoreError(f"no pool node answers at {self._where} ({error}): {what_to_do}") from None

    @property
    def counters(self) -> StoreCounters:
        return self._reach.counters

    @property
    def is_near(self) -> bool:
        """True if the node lends its memory to this process."""
        return self._dialer.is_near

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        new = {block_hash: memory.cast("B") for block_hash, memory in blocks if self._fits(block_hash, memory)}
        kept = dict(zip(new, self._in_parts(self._put_part, list(new.items())), strict=True))
        answers = [self._fits(block_hash, memory) and kept[block_hash] for block_hash, memory in blocks]
        self._reach.count(refused=answers.count(False))
        return answers

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        wanted = [(block_hash, memory.cast("B")) for block_hash, memory in blocks if self._fits(block_hash, memory)]
        outcomes = iter(self._in_parts(self._get_part, wanted))
        found = [self._fits(block_hash, memory) and next(outcomes) for block_hash, memory in blocks]
        self._reach.count(hits=found.count(True), misses=found.count(False))
        return found

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        valid = [block_hash for block_hash in dict.fromkeys(hashes) if len(block_hash) == wire.HASH_BYTES]

        def ask(link: NodeLink) -> int:
            send_views(link.connection, [wire.REQUEST.pack(wire.DROP, len(valid)), *valid])
            return wire.receive_number(link.connection)

        self._reach.count(dropped=(self._call(ask) or 0) if valid else 0)

    def held(self) -> list[BlockHash]:
        """List the blocks of all hosts, oldest first."""
        try:
            with self._dialer.connect().connection as connection:
                send_views(connection, [wire.REQUEST.pack(wire.HELD, 0)])
                return wire.receive_hashes(connection, wire.receive_number(connection))
        except OSError as error:
            raise StoreError(f"{self._where} does not list its blocks: {error}") from None

    def close(self) -> None:
        self._reach.close()
        self._threads.shutdown()
        self._copiers.shutdown()
        self._hang_up()

    def _fits(self, block_hash: BlockHash, memory: memoryview) -> bool:
        return memory.nbytes == self._block_bytes and len(block_hash) == wire.HASH_BYTES

    def _ask(self) -> None:
        self._dialer.connect().connection.close()

    def _hang_up(self) -> None:
        while True:
            try:
                self._idle.get_nowait().connection.close()
            except queue.Empty:
                return

    def _call(self, ask: Callable[[NodeLink], T]) -> T | None:
        """Call `ask` with an idle connection, or with a new one if that is broken. Return None if the node is gone."""
        if not self._reach.is_open:
            return None
        try:
            link = self._idle.get_nowait()
        except queue.Empty:
            pass
        else:
            try:
                return self._asked(link, ask)
            except OSError:
                self._hang_up()  # the node has restarted or closed idle connections: the others are broken too
        try:
            return self._asked(self._dialer.connect(), ask)
        except (OSError, StoreError) as error:
            self._reach.lost(error)
            return None

    def _asked(self, link: NodeLink, ask: Callable[[NodeLink], T]) -> T:
        try:
            answer = ask(link)
        except OSError:
            link.connection.close()
            raise
        self._idle.put(link)
        return answer

    def _in_parts(self, call: Callable[[Sequence[Block]], list[bool]], blocks: list[Block]) -> list[bool]:
        """Divide blocks among the TCP connections, at least `PART_BYTES` each. Return an answer per block, in order.

        Over lent memory there is one part: threads divide its copies.
        """
        total_bytes = len(blocks) * self._block_bytes
        parts = 1 if self.is_near else max(1, min(self._streams, total_bytes // PART_BYTES, len(blocks)))
        size = min(wire.HASHES_MAX, max(1, -(-len(blocks) // parts)))
        cut = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        if not self._reach.is_open:
            return [False] * len(blocks)
        done = map(call, cut) if self.is_near or len(cut) == 1 else self._threads.map(call, cut)
        return [answer for part in done for answer in part]

    def _put_part(self, blocks: Sequence[Block]) -> list[bool]:
        wanted, kept = self._call(lambda link: link.put(blocks)) or (bytes(len(blocks)), bytes(len(blocks)))
        self._reach.count(put=sum(1 for flags in zip(wanted, kept, strict=True) if all(flags)))
        return [bool(flag) for flag in kept]

    def _get_part(self, blocks: Sequence[Block]) -> list[bool]:
        came = self._call(lambda link: link.get(blocks)) or [None] * len(blocks)
        damaged = [block_hash for (block_hash, _), is_whole in zip(blocks, came, strict=True) if is_whole is False]
        if damaged:
            self._reach.count(damaged=len(damaged))
            self.drop(damaged)
        return [bool(is_whole) for is_whole in came]
