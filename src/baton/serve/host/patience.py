"""When a store that fails again and again is left alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from baton.core.keeping import TierNews, TierRests

log = logging.getLogger("baton.host")

FAILURES_MAX = 3
"""Calls that fail one after the other before a store is left alone."""
FIRST_PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""How long. Twice as long each time that the first call after it fails too."""


class Patience:
    """Counts the failures of one store, and tells its pool when to leave it alone and when to try again."""

    def __init__(self, tier: str, tell: Callable[[TierNews], None]) -> None:
        self._tier = tier
        self._tell = tell
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._timer: threading.Timer | None = None
        """Runs while it is left alone."""
        self._closed = False

    def answered(self) -> None:
        """The store has done what it was asked for, or could have."""
        with self._lock:
            if self._timer is None:
                self._failures, self._pause_s = 0, FIRST_PAUSE_S

    def failed(self, reason: str) -> None:
        """A call has failed, or was not answered."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES_MAX or self._timer is not None or self._closed:
                return
            pause_s, self._pause_s = self._pause_s, min(PAUSE_S_MAX, 2 * self._pause_s)
            timer = self._timer = threading.Timer(pause_s, self._try_again)
            timer.daemon = True
        self._tell(TierRests(self._tier, rests=True))
        log.warning("tier %s is left alone for %g s: %s", self._tier, pause_s, reason)
        timer.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()

    def _try_again(self) -> None:
        with self._lock:
            self._timer, self._failures = None, FAILURES_MAX - 1
        self._tell(TierRests(self._tier, rests=False))
