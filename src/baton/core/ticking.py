"""Events that the driver makes for the coordinator: timers, token counts, and commands of administrators."""

from __future__ import annotations

from msgspec import Struct

from baton.core.leaving import RestartWanted
from baton.core.types import LoadWindow, RequestId, Role


class WaitedTooLong(Struct, frozen=True, tag=True):
    """No worker became available within `wait_s`: reject the requests that have waited at least that long.

    The driver sends it when the oldest waiting request is overdue; see `Coordinator.waiting_since_s`.
    """

    wait_s: float


class QueuedTooLong(Struct, frozen=True, tag=True):
    """The oldest request without a first step is overdue: reject every overdue request.

    The driver sends it; see `StartQueue.next_check_s`.
    """


class Tick(Struct, frozen=True, tag=True):
    """Run the policies for roles, scaling and moves. `window`: the load since the last tick."""

    window: LoadWindow


class ScaleWanted(Struct, frozen=True, tag=True):
    """An administrator wants this many workers of a role, whatever the scaling policy asks for. None: no longer."""

    role: Role
    workers: int | None


class TokensServed(Struct, frozen=True, tag=True, gc=False):
    """Output tokens since the last such event, by request. Sent only if the fairness policy counts service."""

    requests: tuple[tuple[RequestId, int], ...]


DriverEvent = Tick | WaitedTooLong | QueuedTooLong | TokensServed | RestartWanted | ScaleWanted
