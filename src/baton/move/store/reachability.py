"""Whether a store's server is reachable. While it is not, calls fail at once and one thread probes the server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from baton.move.backoff import Backoff
from baton.move.store.port import StoreCounters

log = logging.getLogger("baton.store")

BACKOFF = Backoff(0.1, 10.0)


class Reachability:
    """Set `reachable` to False at a failure, and to True once a probe succeeds, with back-off.

    A caller never waits for a server that is known to be unreachable: its blocks are misses and are recomputed.
    """

    def __init__(self, where: str, ask: Callable[[], None], failures: tuple[type[Exception], ...]) -> None:
        """`ask` probes the server: it returns, or raises one of `failures`, within a short time."""
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
        """True if the server is reachable and the store is not closed."""
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
        """Note that the server did not answer, and start to probe it."""
        with self._lock:
            self.counters.io_errors += 1
            if not self.is_open:
                return
            asking = threading.Thread(target=self._ask_again, name="baton-store-reach", daemon=True)
            try:
                asking.start()
            except RuntimeError:
                return  # no thread can probe: the store stays reachable, and the next call tries
            self._asking = asking
            self.counters.reachable = False
        log.warning("the KV store at %s does not answer (%s): its blocks are misses until it does", self._where, error)

    def refused(self, error: Exception) -> None:
        """Note that the server answered with an error, as when it is full. Each kind is logged once."""
        kind = str(error).split(" ", 1)[0]
        with self._lock:
            self.counters.io_errors += 1
            told = kind in self._told
            self._told.add(kind)
        if not told:
            log.warning("the KV store at %s refuses: %s (logged once)", self._where, error)

    def close(self) -> None:
        self._closed.set()
        if self._asking is not None:
            self._asking.join()

    def _ask_again(self) -> None:
        failures = 1
        while not self._closed.wait(BACKOFF.pause_s(failures)):
            failures += 1
            try:
                self._ask()
            except self._failures:
                continue
            log.warning("the KV store at %s answers again", self._where)
            with self._lock:
                self.counters.reachable = True
            return
