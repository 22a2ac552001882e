"""Handle failing stores of tiers: a circuit breaker for an open store, and repeated attempts to open the others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from baton.core.errors import ConfigError, StoreError
from baton.core.tier_messages import StoreEvent, TierRests
from baton.move.backoff import Backoff
from baton.serve.host.tier_opening import OpenTier, UnopenedTier

log = logging.getLogger("baton.host")

FAILURES_MAX = 3
"""Consecutive failed calls after which the pool stops using a store."""
BACKOFF = Backoff(1.0, 60.0)


class CircuitBreaker:
    """Counts consecutive failures of one store, and tells the pool to stop using it for a while."""

    def __init__(self, tier: str, tell: Callable[[StoreEvent], None]) -> None:
        """`tell` is called from any thread."""
        self._tier = tier
        self._tell = tell
        self._lock = threading.Lock()
        self._failures = 0
        self._pauses = 0
        """Pauses since the last successful call."""
        self._timer: threading.Timer | None = None
        """Ends the current pause. None: the store is in use."""
        self._closed = False

    def succeed(self) -> None:
        """Note a successful call. During a pause it is ignored, because the call began before the pause."""
        with self._lock:
            if self._timer is None:
                self._failures = self._pauses = 0

    def fail(self, reason: str) -> None:
        """Note a call that failed or was not answered in time."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES_MAX or self._timer is not None or self._closed:
                return
            self._pauses += 1
            pause_s = BACKOFF.pause_s(self._pauses)
            timer = self._timer = threading.Timer(pause_s, self._try_again)
            timer.daemon = True
        self._tell(TierRests(self._tier, rests=True))
        log.warning("tier %s is not used for %g s: %s", self._tier, pause_s, reason)
        timer.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()

    def _try_again(self) -> None:
        with self._lock:
            self._timer, self._failures = None, FAILURES_MAX - 1  # a single further failure opens the circuit again
        self._tell(TierRests(self._tier, rests=False))


class TierReopener:
    """Repeats attempts to open stores that could not be opened at the start. Until then the pool skips their tiers.

    Each tier has one thread, which ends once the store is open. A store that hangs while it is opened blocks only its
    own thread.
    """

    def __init__(
        self, tiers: Sequence[UnopenedTier], *, tell: Callable[[StoreEvent], None], add: Callable[[OpenTier, int], None]
    ) -> None:
        """`tell` and `add` are called from any thread. `add` gets a tier and its announced capacity in blocks."""
        self._tiers = tiers
        self._tell = tell
        self._add = add
        self._has_begun = False
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def begin(self) -> None:
        """Tell the pool that these tiers are not usable, and start trying. A second call does nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        for tier in self._tiers:
            name = tier.rules.name
            self._tell(TierRests(name, rests=True))
            threading.Thread(target=partial(self._try, tier), name=f"{name}-opens", daemon=True).start()

    def close(self) -> None:
        """End the attempts. No tier is added after this."""
        with self._lock:
            self._closed.set()

    def _try(self, tier: UnopenedTier) -> None:
        failures = 1  # the attempt at the start
        while not self._closed.wait(BACKOFF.pause_s(failures)):
            try:
                opened = tier.open()
            except (StoreError, ConfigError, OSError) as error:  # OSError: a client library may pass a network error on
                failures += 1
                pause_s = BACKOFF.pause_s(failures)
                log.warning("tier %s: %s; tried again in %g s", tier.rules.name, error, pause_s)
                continue
            self._add_tier(opened, tier.rules.blocks_max)
            return

    def _add_tier(self, opened: OpenTier, blocks_max: int) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._add(opened, blocks_max)
                log.warning("tier %s is open and is used from now on", opened.name)
                return
        opened.store.close()
