"""What the coordinator is told because time has passed."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import LoadWindow


class WaitedTooLong(Struct, frozen=True, tag=True):
    """Whoever has waited for a worker for so long, since the last one was lost or since it arrived, waits in vain.

    Said by the driver when the first of them has: see `Coordinator.waiting_since_s`.
    """

    wait_s: float


class Tick(Struct, frozen=True, tag=True):
    """Time for roles and scaling to be looked at, with what went through the cluster since the last one."""

    window: LoadWindow
