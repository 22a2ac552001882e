"""Tiers whose stores could not be opened at the start: they are tried again, with pauses that grow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from baton.core.errors import ConfigError, StoreError
from baton.core.keeping import TierNews, TierRests
from baton.serve.host.patience import FIRST_PAUSE_S, PAUSE_S_MAX
from baton.serve.host.tier_opening import OpenTier, UnopenedTier

log = logging.getLogger("baton.host")


class LateTiers:
    """Until its store is open a tier is left alone, as one whose store has failed: nobody writes to it or reads.

    One thread per tier, which ends when it is open. A store that hangs while it is opened keeps its thread, and the
    tier stays left alone.
    """

    def __init__(
        self, tiers: Sequence[UnopenedTier], *, tell: Callable[[TierNews], None], add: Callable[[OpenTier, int], None]
    ) -> None:
        """`tell` and `add` are called by any thread. `add` takes up a tier, with the room that it was said to have."""
        self._tiers = tiers
        self._tell = tell
        self._add = add
        self._has_begun = False
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def begin(self) -> None:
        """Tell that these tiers are left alone, and go on trying to open them. Once: again it does nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        for tier in self._tiers:
            name = tier.rules.name
            self._tell(TierRests(name, rests=True))
            threading.Thread(target=partial(self._try, tier), name=f"{name}-opens", daemon=True).start()

    def close(self) -> None:
        """Take up nothing more."""
        with self._lock:
            self._closed.set()

    def _try(self, tier: UnopenedTier) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.wait(pause_s):
            try:
                opened = tier.open()
            except (StoreError, ConfigError, OSError) as error:  # a library of a store may let the network through
                pause_s = min(PAUSE_S_MAX, 2 * pause_s)
                log.warning("tier %s: %s; tried again in %g s", tier.rules.name, error, pause_s)
                continue
            self._take_up(opened, tier.rules.blocks_max)
            return

    def _take_up(self, opened: OpenTier, known_blocks: int) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._add(opened, known_blocks)
                log.warning("tier %s is open: it is used from now on", opened.name)
                return
        opened.store.close()
