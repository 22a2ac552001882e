"""Read and write KV blocks of tiers in threads: in the server for its own host, in the mover for other hosts.

A command to a store that hangs is answered after `ANSWER_S`; no request waits longer for a store. The hanging call
uses a buffer of its own, so it cannot touch a block of the arena later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import numpy as np

from baton.core.errors import StoreError, TransferError
from baton.core.tier_messages import (
    BlocksKept,
    DropBlocks,
    LoadBlocks,
    LoadEnded,
    StoreBlocks,
    StoreEvent,
    TierOpened,
    TierRests,
    TierShrunk,
)
from baton.core.types import BlockHash
from baton.move.clock import now_s
from baton.move.store.port import Store
from baton.move.threads import WorkThreads
from baton.serve.host.arena_bytes import ArenaBytes
from baton.serve.host.tier_opening import OpenTier, UnopenedTier
from baton.serve.host.tier_recovery import CircuitBreaker, TierReopener

log = logging.getLogger("baton.host")

ANSWER_S = 5.0
"""Deadline of a command, in seconds. Blocks that a store has not finished by then count as missing."""
CLOSE_S = 10.0
"""Maximum seconds for the stores to finish their calls and close. A slower store stays open until the process ends."""
PIECE_BYTES = 32 << 20
"""Size of each thread's buffer. Larger reads and writes are split into pieces."""
READERS = 3
"""Threads that read from one store. One more thread writes and drops, in the order of the commands."""
LIST_PIECE = 1000
"""Maximum block hashes per message. A longer message would block the pool's event loop."""
LISTED_MAX = 1_000_000
"""Maximum block hashes in a listing: the youngest blocks. Each hash takes about 80 bytes of memory."""


@dataclass(slots=True)
class _Work:
    """A read or write in progress. A thread uses the arena only while it holds `lock` and `closed` is False."""

    command: StoreBlocks | LoadBlocks
    began_s: float
    flags: list[bool]
    waiting: set[str]
    """Tiers that have not answered yet."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    took_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds that each tier took to answer, or to miss the deadline."""
    closed: bool = False


@dataclass(slots=True)
class _Tier:
    """A tier with an open store, and its threads."""

    store: Store
    list_s: float
    blocks_max: int
    """Capacity that was last reported to the pool."""
    writer: WorkThreads
    readers: WorkThreads
    breaker: CircuitBreaker
    damaged: int = 0
    """Number of damaged blocks reported so far."""


class TierWork:
    """Carries out a pool's commands to its tiers. Every read and write is answered exactly once, even if it fails."""

    def __init__(
        self,
        tiers: Sequence[OpenTier | UnopenedTier],
        arena: ArenaBytes,
        block_bytes: int,
        tell: Callable[[StoreEvent], None],
    ) -> None:
        """`tell` is called from any thread."""
        self._arena = arena
        self._block_bytes = block_bytes
        self._tell = tell
        self._piece_blocks = max(1, PIECE_BYTES // block_bytes)
        self._tiers: dict[str, _Tier] = {}
        for tier in tiers:
            if isinstance(tier, OpenTier):
                self._add(tier, tier.rules.blocks_max)
        unopened = [tier for tier in tiers if isinstance(tier, UnopenedTier)]
        self._reopener = TierReopener(unopened, tell=tell, add=self._add_late)
        self._begun: SimpleQueue[_Work | None] = SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="tiers-watch", daemon=True).start()

    def _add_late(self, tier: OpenTier, blocks_max: int) -> None:
        """Add a tier whose store was opened late. Tell the pool that the tier is usable, and list its blocks."""
        self._add(tier, blocks_max)
        self._report_capacity(tier.name)
        self._tell(TierRests(tier.name, rests=False))
        self._begin_list(tier.name)

    def _add(self, tier: OpenTier, blocks_max: int) -> None:
        name = tier.name
        self._tiers[name] = _Tier(
            store=tier.store,
            list_s=tier.list_s,
            blocks_max=blocks_max,
            writer=WorkThreads(f"{name}-writes", 1),
            readers=WorkThreads(f"{name}-reads", READERS),
            breaker=CircuitBreaker(name, self._tell),
        )

    def keep(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None:
        """Begin to carry out a command. The answer to StoreBlocks is BlocksKept, that to LoadBlocks is LoadEnded."""
        match command:
            case DropBlocks(tier=tier, hashes=hashes):
                if tier in self._tiers:
                    self._tiers[tier].writer.submit(partial(self._drop, tier, hashes))
            case StoreBlocks():
                work = self._begin(command, {command.tier})
                for tier in sorted(work.waiting):
                    self._tiers[tier].writer.submit(partial(self._put, work, command))
            case LoadBlocks():
                work = self._begin(command, set(command.tiers))
                for tier in sorted(work.waiting):
                    self._tiers[tier].readers.submit(partial(self._get, work, command, tier))

    def list_held(self) -> None:
        """Report the blocks that every tier has from earlier runs, as TierOpened; empty if the store cannot list them.

        Shared stores are listed periodically, to find blocks of other hosts. Opening the unopened stores is retried.
        """
        opened = list(self._tiers)
        self._reopener.begin()
        for name in opened:
            self._begin_list(name)

    def _begin_list(self, name: str) -> None:
        listing = partial(self._list, name, self._tiers[name].list_s)
        threading.Thread(target=listing, name=f"{name}-lists", daemon=True).start()

    def close(self) -> list[str]:
        """Finish the current writes, drop the queued ones, and close stores and arena.

        Return the tiers whose stores did not close in time. No thread uses the arena after this.
        """
        self._reopener.close()
        self._closed.set()
        self._begun.put(None)
        until_s = now_s() + CLOSE_S
        for open_tier in self._tiers.values():
            open_tier.writer.stop()
            open_tier.readers.stop()
        hung: list[str] = []

        def left_s() -> float:
            return max(0.0, until_s - now_s())

        for name, open_tier in self._tiers.items():
            open_tier.breaker.close()
            has_ended = open_tier.writer.join(left_s) and open_tier.readers.join(left_s)
            closing = threading.Thread(target=open_tier.store.close, name=f"{name}-closes", daemon=True)
            closing.start()
            closing.join(left_s())
            if not has_ended or closing.is_alive():
                hung.append(name)
        self._arena.close()
        return hung

    def _begin(self, command: StoreBlocks | LoadBlocks, tiers: set[str]) -> _Work:
        """Start the deadline of a command. Tiers without an open store count as answered: they have no block."""
        work = _Work(command, now_s(), [False] * len(command.hashes), {name for name in tiers if name in self._tiers})
        if work.waiting:
            self._begun.put(work)
        else:
            self._answer(work)
        return work

    def _watch(self) -> None:
        """Answer commands after their deadline. All have the same limit, so they expire in the order they began."""
        while (work := self._begun.get()) is not None:
            self._closed.wait(max(0.0, work.began_s + ANSWER_S - now_s()))
            if self._closed.is_set():
                return
            with work.lock:
                late = set() if work.closed else set(work.waiting)
                work.closed = True
            for tier in late:
                work.took_s[tier] = now_s() - work.began_s
                self._tiers[tier].breaker.fail(f"it has not answered for {ANSWER_S:g} s")
            if late:
                self._answer(work)

    def _end(self, work: _Work, tier: str) -> None:
        """Note that a tier has finished its part of a command. Answer the command if all tiers have."""
        with work.lock:
            if work.closed:
                return
            work.waiting.discard(tier)
            work.took_s[tier] = now_s() - work.began_s
            is_last = work.closed = not work.waiting
        if is_last:
            self._answer(work)

    def _answer(self, work: _Work) -> None:
        command, flags = work.command, tuple(work.flags)
        if isinstance(command, StoreBlocks):
            self._tell(BlocksKept(command.number, flags))
        else:
            damaged = self._new_damage(work.took_s)
            self._tell(LoadEnded(command.request_id, command.number, flags, work.took_s, damaged))

    def _new_damage(self, tiers: dict[str, float]) -> dict[str, int]:
        """Return how many damaged blocks each store has found since the last call."""
        found: dict[str, int] = {}
        for name in tiers:
            open_tier = self._tiers[name]
            before, open_tier.damaged = open_tier.damaged, open_tier.store.counters.damaged
            if open_tier.damaged > before:
                found[name] = open_tier.damaged - before
        return found

    # ---- run by the threads of a tier

    def _pieces(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        return (indices[first : first + self._piece_blocks] for first in range(0, len(indices), self._piece_blocks))

    def _put(self, work: _Work, command: StoreBlocks) -> None:
        try:
            for indices in self._pieces(range(len(command.hashes))):
                if not self._put_piece(work, command, indices):
                    return
        except TransferError as error:
            log.warning("tier %s: blocks are not kept: %s", command.tier, error)
        finally:
            self._end(work, command.tier)
        self._report_capacity(command.tier)

    def _put_piece(self, work: _Work, command: StoreBlocks, indices: Sequence[int]) -> bool:
        """Write the blocks at `indices` to the store. Return False if the command's deadline has passed."""
        with work.lock:
            if work.closed:
                return False
            copies = self._arena.read([command.blocks[index] for index in indices])
        pairs = [(command.hashes[index], memoryview(copies[row])) for row, index in enumerate(indices)]
        kept = self._ask(command.tier, partial(self._tiers[command.tier].store.put, pairs), len(pairs))
        with work.lock:
            for index, is_kept in zip(indices, kept, strict=True):
                work.flags[index] = is_kept
        return True

    def _report_capacity(self, tier: str) -> None:
        """Report the store's capacity to the pool if it has shrunk since the last report."""
        open_tier = self._tiers[tier]
        blocks_max = open_tier.store.capacity_blocks
        if blocks_max is not None and blocks_max < open_tier.blocks_max:
            open_tier.blocks_max = blocks_max
            self._tell(TierShrunk(tier, blocks_max))

    def _get(self, work: _Work, command: LoadBlocks, tier: str) -> None:
        """Read those blocks of a load that this tier has, up to the first missing block."""
        indices = [index for index, name in enumerate(command.tiers) if name == tier]
        try:
            for piece in self._pieces(indices):
                if work.closed or not self._get_piece(work, command, tier, piece):
                    break
        except TransferError as error:
            log.warning("tier %s: blocks that were read could not be copied into the arena: %s", tier, error)
        finally:
            self._end(work, tier)

    def _get_piece(self, work: _Work, command: LoadBlocks, tier: str, indices: Sequence[int]) -> bool:
        """Read the blocks at `indices` into the arena. Return whether the store had all of them."""
        read = np.empty((len(indices), self._block_bytes), np.uint8)  # [blocks, bytes]
        pairs = [(command.hashes[index], memoryview(read[row])) for row, index in enumerate(indices)]
        whole = self._ask(tier, partial(self._tiers[tier].store.get, pairs), len(pairs))
        good = [row for row, is_whole in enumerate(whole) if is_whole]
        with work.lock:
            if work.closed:
                return False
            self._arena.write([command.write[indices[row]] for row in good], read[good])
            for row in good:
                work.flags[indices[row]] = True
        return len(good) == len(indices)

    def _drop(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        try:
            self._tiers[tier].store.drop(hashes)
        except (StoreError, OSError) as error:
            log.warning("tier %s: %s; blocks that should be dropped stay there", tier, error)

    def _list(self, tier: str, list_s: float) -> None:
        """Report the blocks of a store, then its new blocks every `list_s` seconds (0: never again)."""
        told: set[BlockHash] = set()
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            began_s = now_s()
            try:
                held = self._tiers[tier].store.held()[-LISTED_MAX:]
            except (StoreError, OSError) as error:
                log.warning("tier %s: %s; blocks that other hosts have put there are not found", tier, error)
                held = []
            fresh = [name for name in held if name not in told]
            told = set(held) if list_s else told
            for first in range(0, max(1, len(fresh)), LIST_PIECE):
                piece, end = fresh[first : first + LIST_PIECE], first + LIST_PIECE
                self._tell(TierOpened(tier, tuple(piece), more=end < len(fresh)))
            if not list_s:
                return
            pause_s = max(list_s, 20 * (now_s() - began_s))

    def _ask(self, tier: str, ask: Callable[[], list[bool]], blocks: int) -> list[bool]:
        """Call a store, and pass the outcome to its circuit breaker. After an error, return False for every block."""
        open_tier = self._tiers[tier]
        try:
            answered = ask()
        except (StoreError, OSError) as error:
            open_tier.breaker.fail(str(error))
            return [False] * blocks
        if open_tier.store.counters.reachable:
            open_tier.breaker.succeed()
        else:
            open_tier.breaker.fail("it is out of reach")
        return answered
