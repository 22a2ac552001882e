"""Moves blocks between an arena and the stores below it, in threads: in the server for its own host, in a mover else.

Bytes go through memory of their own, never straight between arena and store: so a store that hangs can be answered for
after `ANSWER_S`, and what it still does then touches no block. No request waits longer than that for it.
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
from baton.core.keeping import (
    BlocksKept,
    DropBlocks,
    LoadBlocks,
    LoadEnded,
    StoreBlocks,
    TierNews,
    TierOpened,
    TierRests,
    TierShrunk,
)
from baton.core.types import BlockHash
from baton.move.clock import now_s
from baton.move.store.port import Store
from baton.move.threads import WorkThreads
from baton.serve.host.arena_bytes import ArenaBytes
from baton.serve.host.late_tiers import LateTiers
from baton.serve.host.patience import Patience
from baton.serve.host.tier_opening import OpenTier, UnopenedTier

log = logging.getLogger("baton.host")

ANSWER_S = 5.0
"""A store that has not answered for so long is answered for: nothing was kept, and no more was read than is there."""
CLOSE_S = 10.0
"""How long a store may take to end what it does and to close. Then it is left to the end of the process."""
PIECE_BYTES = 32 << 20
"""Most memory of one thread: larger reads and writes are done in pieces."""
READERS = 3
"""Threads that read from one store. One more writes and drops, so that this happens in the order that was wanted."""
LIST_PIECE = 1000
"""Names that are told at once: the books of a host are kept by a loop that must not be held up."""
LISTED_MAX = 1_000_000
"""Most names of a list, the youngest: what is remembered of it takes about 80 bytes each."""


@dataclass(slots=True)
class _Work:
    """One write or read. Whoever touches the arena for it holds the lock, and does not once it is closed."""

    command: StoreBlocks | LoadBlocks
    began_s: float
    flags: list[bool]
    waiting: set[str]
    """Tiers that have not answered."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    took_s: dict[str, float] = field(default_factory=dict[str, float])
    """Of tiers that have answered."""
    closed: bool = False


@dataclass(slots=True)
class _Served:
    """A tier whose store is open, and who works for it."""

    store: Store
    list_s: float
    blocks_max: int
    """Blocks that it is known to have room for."""
    writer: WorkThreads
    readers: WorkThreads
    patience: Patience
    damaged: int = 0
    """Blocks that were found damaged, as of the last answer."""


class TierWork:
    """Carries out what a pool wants of its tiers. Whatever a store does, every command is answered once."""

    def __init__(
        self,
        tiers: Sequence[OpenTier | UnopenedTier],
        arena: ArenaBytes,
        block_bytes: int,
        tell: Callable[[TierNews], None],
    ) -> None:
        """`tell` is called by any thread."""
        self._arena = arena
        self._block_bytes = block_bytes
        self._tell = tell
        self._piece_blocks = max(1, PIECE_BYTES // block_bytes)
        self._tiers: dict[str, _Served] = {}
        for tier in tiers:
            if isinstance(tier, OpenTier):
                self._take_up(tier, tier.rules.blocks_max)
        unopened = [tier for tier in tiers if isinstance(tier, UnopenedTier)]
        self._late = LateTiers(unopened, tell=tell, add=self._add)
        self._begun: SimpleQueue[_Work | None] = SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="tiers-watch", daemon=True).start()

    def _add(self, tier: OpenTier, known_blocks: int) -> None:
        """Take up a tier that could not be opened at the start: tell that it can be used, and what is in it."""
        self._take_up(tier, known_blocks)
        self._look_for_room(tier.name)
        self._tell(TierRests(tier.name, rests=False))
        self._begin_list(tier.name)

    def _take_up(self, tier: OpenTier, known_blocks: int) -> None:
        name = tier.name
        self._tiers[name] = _Served(
            store=tier.store,
            list_s=tier.list_s,
            blocks_max=known_blocks,
            writer=WorkThreads(f"{name}-writes", 1),
            readers=WorkThreads(f"{name}-reads", READERS),
            patience=Patience(name, self._tell),
        )

    def keep(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None:
        """Begin to carry out a command. StoreBlocks is answered with BlocksKept, LoadBlocks with LoadEnded."""
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
        """Tell of every tier what earlier runs have left in it: TierOpened, with nothing where that cannot be found.

        Of stores that others use too, go on to tell what is new there. Those that could not be opened are tried again.
        """
        opened = list(self._tiers)
        self._late.begin()
        for name in opened:
            self._begin_list(name)

    def _begin_list(self, name: str) -> None:
        listing = partial(self._list, name, self._tiers[name].list_s)
        threading.Thread(target=listing, name=f"{name}-lists", daemon=True).start()

    def close(self) -> list[str]:
        """Let writes that have begun end, forget the others, and let go of stores and arena.

        Returns the tiers whose stores have not ended in time. Nothing touches the arena after this.
        """
        self._late.close()
        self._closed.set()
        self._begun.put(None)
        until_s = now_s() + CLOSE_S
        for served in self._tiers.values():
            served.writer.stop()
            served.readers.stop()
        hung: list[str] = []

        def left_s() -> float:
            return max(0.0, until_s - now_s())

        for name, served in self._tiers.items():
            served.patience.close()
            has_ended = served.writer.join(left_s) and served.readers.join(left_s)
            closing = threading.Thread(target=served.store.close, name=f"{name}-closes", daemon=True)
            closing.start()
            closing.join(left_s())
            if not has_ended or closing.is_alive():
                hung.append(name)
        self._arena.close()
        return hung

    def _begin(self, command: StoreBlocks | LoadBlocks, tiers: set[str]) -> _Work:
        """Those of the tiers whose stores could not be opened keep nothing and have nothing."""
        work = _Work(command, now_s(), [False] * len(command.hashes), {name for name in tiers if name in self._tiers})
        if work.waiting:
            self._begun.put(work)
        else:
            self._answer(work)
        return work

    def _watch(self) -> None:
        """Answer for what takes too long. All have the same time, so they run out of it in the order of their begin."""
        while (work := self._begun.get()) is not None:
            self._closed.wait(max(0.0, work.began_s + ANSWER_S - now_s()))
            if self._closed.is_set():
                return
            with work.lock:
                late = set() if work.closed else set(work.waiting)
                work.closed = True
            for tier in late:
                work.took_s[tier] = now_s() - work.began_s
                self._tiers[tier].patience.failed(f"it has not answered for {ANSWER_S:g} s")
            if late:
                self._answer(work)

    def _end(self, work: _Work, tier: str) -> None:
        """A tier is done with its part. The last one answers for all."""
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
            damaged = self._found_damaged(work.took_s)
            self._tell(LoadEnded(command.request_id, command.number, flags, work.took_s, damaged))

    def _found_damaged(self, tiers: dict[str, float]) -> dict[str, int]:
        """Count what these stores have found damaged since the last time."""
        found: dict[str, int] = {}
        for name in tiers:
            served = self._tiers[name]
            before, served.damaged = served.damaged, served.store.counters.damaged
            if served.damaged > before:
                found[name] = served.damaged - before
        return found

    # ---- in a thread

    def _pieces(self, places: Sequence[int]) -> Iterator[Sequence[int]]:
        return (places[first : first + self._piece_blocks] for first in range(0, len(places), self._piece_blocks))

    def _put(self, work: _Work, command: StoreBlocks) -> None:
        try:
            for places in self._pieces(range(len(command.hashes))):
                if not self._put_piece(work, command, places):
                    return
        except TransferError as error:
            log.warning("tier %s: blocks are not kept: %s", command.tier, error)
        finally:
            self._end(work, command.tier)
        self._look_for_room(command.tier)

    def _put_piece(self, work: _Work, command: StoreBlocks, places: Sequence[int]) -> bool:
        """Write some blocks. Returns whether an answer is still waited for."""
        with work.lock:
            if work.closed:
                return False
            copies = self._arena.read([command.blocks[place] for place in places])
        pairs = [(command.hashes[place], memoryview(copies[row])) for row, place in enumerate(places)]
        kept = self._ask(command.tier, partial(self._tiers[command.tier].store.put, pairs), len(pairs))
        with work.lock:
            for place, is_kept in zip(places, kept, strict=True):
                work.flags[place] = is_kept
        return True

    def _look_for_room(self, tier: str) -> None:
        """Tell once where a store turns out to have less room than it was opened with."""
        served = self._tiers[tier]
        blocks_max = served.store.capacity_blocks
        if blocks_max is not None and blocks_max < served.blocks_max:
            served.blocks_max = blocks_max
            self._tell(TierShrunk(tier, blocks_max))

    def _get(self, work: _Work, command: LoadBlocks, tier: str) -> None:
        """Read what this tier has of a load, up to the first block that is not there."""
        places = [place for place, name in enumerate(command.tiers) if name == tier]
        try:
            for piece in self._pieces(places):
                if work.closed or not self._get_piece(work, command, tier, piece):
                    break
        except TransferError as error:
            log.warning("tier %s: blocks that were read are lost: %s", tier, error)
        finally:
            self._end(work, tier)

    def _get_piece(self, work: _Work, command: LoadBlocks, tier: str, places: Sequence[int]) -> bool:
        """Read some blocks. Returns whether all of them are there."""
        read = np.empty((len(places), self._block_bytes), np.uint8)  # [blocks, bytes]
        pairs = [(command.hashes[place], memoryview(read[row])) for row, place in enumerate(places)]
        whole = self._ask(tier, partial(self._tiers[tier].store.get, pairs), len(pairs))
        good = [row for row, is_whole in enumerate(whole) if is_whole]
        with work.lock:
            if work.closed:
                return False
            self._arena.write([command.write[places[row]] for row in good], read[good])
            for row in good:
                work.flags[places[row]] = True
        return len(good) == len(places)

    def _drop(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        try:
            self._tiers[tier].store.drop(hashes)
        except (StoreError, OSError) as error:
            log.warning("tier %s: %s; what was dropped stays there", tier, error)

    def _list(self, tier: str, list_s: float) -> None:
        """Tell what a store has, and then, every so often, what it has that it had not the last time."""
        told: set[BlockHash] = set()
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            began_s = now_s()
            try:
                held = self._tiers[tier].store.held()[-LISTED_MAX:]
            except (StoreError, OSError) as error:
                log.warning("tier %s: %s; what others have put there is not found", tier, error)
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
        """Ask a store. One that fails altogether has done nothing."""
        served = self._tiers[tier]
        try:
            answered = ask()
        except (StoreError, OSError) as error:
            served.patience.failed(str(error))
            return [False] * blocks
        if served.store.counters.reachable:
            served.patience.answered()
        else:
            served.patience.failed("it is out of reach")
        return answered
