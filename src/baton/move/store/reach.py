"""Whether a server that holds blocks answers. While it does not, callers are told at once and one thread asks again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from baton.move.store.port import StoreCounters

log = logging.getLogger("baton.store")

FIRST_PAUSE_S, PAUSE_S_MAX = 0.1, 10.0


class Reach:
    """Turns `reachable` off at a failure, and on again when `ask` succeeds, after pauses that double.

    A caller never waits for a server that is known to be away: its blocks are misses, which costs a recompute.
    """

    def __init__(self, where: str, ask: Callable[[], None], failures: tuple[type[Exception], ...]) -> None:
        """`ask` must return or raise one of `failures` within a short time."""
        self.counters = StoreCounters()
        self._where = where
        self._ask = ask
        self._failures = failures
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._closed = threading.Event()
        self._told: set[str] = set()

    @property
    def is_open(self) -> bool:
        """False while it makes no sense to call: out of reach, or closed."""
        return self.counters.reachable and not self._closed.is_set()

    def count(
        self, *, put: int = 0, refused: int = 0, hits: int = 0, misses: int = 0, damaged: int = 0, dropped: int = 0
    ) -> None:
        with self._lock:
            self.counters.put += put
            self.counters.refused += refused
            self.counters.hits += hits
            self.counters.misses += misses
            self.counters.damaged += damaged
            self.counters.dropped += dropped

    def lost(self, error: Exception) -> None:
        """Note that the server did not answer."""
        with self._lock:
            self.counters.io_errors += 1
            if not self.is_open:
                return
            asking = threading.Thread(target=self._ask_again, name="baton-store-reach", daemon=True)
            try:
                asking.start()
            except RuntimeError:
                return  # nobody could say when it answers again: the next call tries
            self._asking = asking
            self.counters.reachable = False
        log.warning("the KV store at %s does not answer (%s): its blocks are misses until it does", self._where, error)

    def refused(self, error: Exception) -> None:
        """Note that the server answered with an error: it is full, say. Each kind is logged once."""
        kind = str(error).split(" ", 1)[0]
        with self._lock:
            self.counters.io_errors += 1
            told = kind in self._told
            self._told.add(kind)
        if not told:
            log.warning("the KV store at %s refuses: %s (said once)", self._where, error)

    def close(self) -> None:
        self._closed.set()
        if self._asking is not None:
            self._asking.join()

    def _ask_again(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.wait(pause_s):
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
            try:
                self._ask()
            except self._failures:
                continue
            log.warning("the KV store at %s answers again", self._where)
            with self._lock:
                self.counters.reachable = True
            return
