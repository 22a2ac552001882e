"""Store in the files of a local folder (NVMe): checksummed, crash-safe, and kept between runs."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.direct_io import IoMode
from baton.move.store.folder import (
    Description,
    IndexEntry,
    check_description,
    lock_folder,
    take_index,
    write_index,
)
from baton.move.store.port import StoreCounters
from baton.move.store.segments import Segments, slot_bytes
from baton.move.store.slot_header import HASH_BYTES_MAX, SlotHeader
from baton.move.store.slot_io import SlotIo, SlotTask, Work
from baton.move.store.slot_table import SlotTable

log = logging.getLogger("baton.store")

THREADS = 8


class FileStore:
    """Slots of one block each in preallocated segment files. The table of slots is in memory only.

    The header of a slot has its block's hash and checksums. So a crash cannot leave an inconsistent state: a slot whose
    bytes do not match its header is empty. A clean shutdown writes an index, so that the next start need not read
    every header.
    """

    name = "file"

    def __init__(
        self,
        folder: Path,
        *,
        layout_fingerprint: str,
        block_bytes: int,
        capacity_bytes: int,
        threads: int = THREADS,
        mode: IoMode = "direct",
    ) -> None:
        """Open a folder and find its blocks. Raises StoreError if it cannot be used.

        `capacity_bytes` bounds the size of the files, headers included.
        """
        slots_max = capacity_bytes // slot_bytes(block_bytes)
        if slots_max < 1:
            raise StoreError(
                f"a KV store of {capacity_bytes} bytes has no room for one block, which takes "
                f"{slot_bytes(block_bytes)} in {folder}: give it more"
            )
        self.capacity_blocks: int | None = slots_max
        self.counters = StoreCounters()
        self._folder = folder
        self._block_bytes = block_bytes
        self._table = SlotTable()
        self._sequence = 0
        self._told: set[int | None] = set()
        """Error numbers that were logged: each is logged once."""
        self._changed = threading.Condition()
        self._calls = 0
        self._closed = False
        self._lock_fd = lock_folder(folder)
        try:
            check_description(folder, Description(layout_fingerprint=layout_fingerprint, block_bytes=block_bytes))
            self._segments = Segments(folder, block_bytes=block_bytes, slots_max=slots_max, mode=mode)
        except (StoreError, OSError) as error:
            os.close(self._lock_fd)
            raise StoreError(str(error)) from None
        self._io = SlotIo(self._segments, layout=fingerprint_digest(layout_fingerprint), block_bytes=block_bytes)
        self._thread_count = threads - 1  # the calling thread works too
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="baton-store")
        self._find_blocks()

    @property
    def io_mode(self) -> IoMode:
        """Whether the files are accessed with direct I/O or through the page cache."""
        return self._segments.mode

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        with self._in_use() as open_:
            new: dict[BlockHash, memoryview] = {}
            with self._changed:
                for block_hash, memory in dict(blocks).items():
                    fits = memory.nbytes == self._block_bytes and len(block_hash) <= HASH_BYTES_MAX
                    if open_ and fits and not self._table.refresh(block_hash):
                        new[block_hash] = memory
                tasks = self._reserve(new)
            try:
                self._do_all(self._io.writes(tasks))
            finally:
                with self._changed:
                    for task in tasks:
                        self._end_write(task)
            with self._changed:
                written = {task.block_hash for task in tasks if task.outcome == "whole"}
                kept = [
                    open_ and (block_hash in written or self._is_held(block_hash, memory))
                    for block_hash, memory in blocks
                ]
                self.counters.refused += kept.count(False)
        return kept

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        with self._in_use() as open_:
            tasks: list[SlotTask | None] = []
            with self._changed:
                for block_hash, memory in blocks:
                    slot = self._table.begin_read(block_hash) if open_ and memory.nbytes == self._block_bytes else None
                    tasks.append(None if slot is None else SlotTask(slot, block_hash, memory.cast("B")))
            wanted = [task for task in tasks if task is not None]
            try:
                self._do_all(self._io.reads(wanted))
            finally:
                with self._changed:
                    for task in wanted:
                        self._end_read(task)
            with self._changed:
                found = [task is not None and task.outcome == "whole" for task in tasks]
                self.counters.hits += found.count(True)
                self.counters.misses += found.count(False)
        return found

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        with self._changed:
            self.counters.dropped += sum([self._table.forget(block_hash) for block_hash in hashes])

    def held(self) -> list[BlockHash]:
        with self._changed:
            return [block_hash for block_hash, _ in self._table.items()]

    def close(self) -> None:
        """Wait for calls under way, sync the files and write the index."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: self._calls == 0)
            entries = [IndexEntry(block_hash, slot) for block_hash, slot in self._table.items()]
            self._table = SlotTable()
        self._threads.shutdown()
        try:
            self._segments.sync()
            write_index(self._folder, sequence=self._sequence, entries=entries)
        except OSError as error:
            log.warning(
                "the KV store in %s has no index (%s): the next start reads every slot header", self._folder, error
            )
        finally:
            self._segments.close()
            os.close(self._lock_fd)

    @contextmanager
    def _in_use(self) -> Iterator[bool]:
        """Keep the files open during a call. Yields False if the store is closed."""
        with self._changed:
            open_ = not self._closed
            self._calls += 1
        try:
            yield open_
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _is_held(self, block_hash: BlockHash, memory: memoryview) -> bool:
        return memory.nbytes == self._block_bytes and self._table.holds(block_hash)

    def _reserve(self, new: dict[BlockHash, memoryview]) -> list[SlotTask]:
        """Reserve slots for as many blocks as possible: free ones first, then those of the oldest blocks."""
        try:
            while self._table.free_slots() < len(new):
                grown = self._segments.grow()
                self._table.add_free(grown)
                if not grown:
                    break
        except OSError as error:
            self.capacity_blocks = len(self._segments.allocated())
            self._tell(error)
        slots, forgotten = self._table.reserve(len(new))
        self.counters.dropped += forgotten
        tasks = []
        for slot, (block_hash, memory) in zip(slots, new.items(), strict=False):
            self._sequence += 1
            tasks.append(SlotTask(slot, block_hash, memory.cast("B"), self._sequence))
        return tasks

    def _end_write(self, task: SlotTask) -> None:
        if task.outcome == "whole":
            self.counters.put += self._table.keep(task.block_hash, task.slot)
        else:
            self._table.add_free([task.slot])

    def _end_read(self, task: SlotTask) -> None:
        if task.outcome != "whole" and self._table.forget(task.block_hash, slot=task.slot):
            self.counters.damaged += task.outcome == "damaged"
        self._table.end_read(task.slot)

    def _do_all(self, works: Sequence[Work]) -> None:
        """Run reads or writes in parallel. A single one runs in the calling thread."""
        waiting = iter(works)  # shared by the threads: each takes the next call when it is done with one

        def work() -> list[OSError]:
            return [error for call in waiting if (error := call()) is not None]

        count = min(len(works), self._thread_count) if len(works) > 1 else 0
        beside = [each for _ in range(count) if (each := self._submit(work)) is not None]
        errors = work() + [error for each in beside for error in each.result()]
        if errors:
            with self._changed:
                for error in errors:
                    self._tell(error)

    def _submit(self, work: Callable[[], list[OSError]]) -> Future[list[OSError]] | None:
        """Run work in another thread. Return None if the system cannot start one."""
        try:
            return self._threads.submit(work)
        except RuntimeError:
            return None

    def _tell(self, error: OSError) -> None:
        self.counters.io_errors += 1
        if error.errno in self._told:
            return
        self._told.add(error.errno)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some, or give the store less" if full else "see the system's log"
        log.warning(
            "the KV store in %s: %s; it continues with the slots it has (%s; logged once)",
            self._folder,
            error.strerror,
            advice,
        )

    def _find_blocks(self) -> None:
        """Fill the table from the index of a clean shutdown, or from the headers of all slots."""
        slots = self._segments.allocated()
        index = take_index(self._folder)
        if index is not None:
            self._sequence, entries = index
        else:
            entries = self._scan(slots)
        free = set(slots)
        for entry in entries:
            if entry.slot in free and not self._table.holds(entry.block_hash):
                free.remove(entry.slot)
                self._table.keep(entry.block_hash, entry.slot)
        self._table.add_free(free)

    def _scan(self, slots: list[int]) -> list[IndexEntry]:
        """Read the header of every slot. Of two slots with the same block hash, the younger one is used."""
        headers: list[SlotHeader] = []
        for found in self._threads.map(self._header_of, slots):
            if isinstance(found, SlotHeader):
                headers.append(found)
            else:
                self.counters.damaged += found == "damaged"
        self._sequence = max((header.sequence for header in headers), default=0)
        youngest = {header.block_hash: header for header in sorted(headers, key=lambda header: header.sequence)}
        aged = sorted(youngest.values(), key=lambda header: header.sequence)
        return [IndexEntry(header.block_hash, header.slot) for header in aged]

    def _header_of(self, slot: int) -> SlotHeader | str:
        try:
            return self._io.read_header(slot)
        except OSError as error:
            with self._changed:
                self._tell(error)
            return "failed"
