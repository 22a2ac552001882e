"""Events of time, for the coordinator."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import LoadWindow


class WaitedTooLong(Struct, frozen=True, tag=True):
    """No worker became available within `wait_s`: reject the requests that have waited for so long.

    The driver sends it when the first one has: see `Coordinator.waiting_since_s`.
    """

    wait_s: float


class Tick(Struct, frozen=True, tag=True):
    """Policies of roles, scaling and moves are due. `window`: the load since the last tick."""

    window: LoadWindow
