"""Faults of a simulated cluster, as plain data in scenarios and fault files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from baton.core.types import HostId, RequestId, Role, WorkerId

KillMoment = Literal["during", "after"]
"""`during`: in the step, whose KV is left as garbage. `after`: after the step, with its report under way."""
ReportsFate = Literal["delivered", "lost", "late"]
"""Fate of a dead worker's last messages: they arrive before the server notices the death, never, or afterwards."""
StoreTrouble = Literal["full", "down", "slow", "damaged", "lost"]
Stage = Literal["arrived", "prefilling", "handed_off", "decoding"]


class Death(Struct, frozen=True, kw_only=True):
    """How the server learns of the end of a process, and when the process restarts."""

    reports: ReportsFate = "delivered"
    notice_s: float = 0.0
    """Time from the death until the server notices it."""
    restart_s: float = 0.0
    """Time from the notice until a new process joins under the same id."""
    late_s: float = 0.0
    """With `late` reports: minimum time from the notice until the last messages arrive."""


class Kill(Struct, frozen=True, tag=True, kw_only=True):
    """The process is killed at a time, even in the middle of a step."""

    worker: WorkerId
    at_s: float
    death: Death = Death()


class KillAtStep(Struct, frozen=True, tag=True, kw_only=True):
    """The process is killed at its nth step."""

    worker: WorkerId
    step: int
    """1 for the first."""
    moment: KillMoment
    death: Death


class Hang(Struct, frozen=True, tag=True, kw_only=True):
    """The process stops responding. The server kills it after `silent_s`."""

    worker: WorkerId
    at_s: float
    silent_s: float
    death: Death = Death()


class Slow(Struct, frozen=True, tag=True, kw_only=True):
    """Steps of a worker that begin within `for_s` take `factor` times as long."""

    worker: WorkerId
    at_s: float
    for_s: float
    factor: float


class DelaySpike(Struct, frozen=True, tag=True, kw_only=True):
    """Every message sent within `for_s` takes `delay_s` longer."""

    at_s: float
    for_s: float
    delay_s: float


class Cancel(Struct, frozen=True, tag=True, kw_only=True):
    """A client disconnects `delay_s` after its request has reached a stage."""

    request_id: RequestId
    stage: Stage
    delay_s: float


class Flip(Struct, frozen=True, tag=True, kw_only=True):
    """An operator changes a worker's role."""

    worker: WorkerId
    at_s: float
    role: Role


class HostKill(Struct, frozen=True, tag=True, kw_only=True):
    """A whole host goes down: its workers, its KV and its wires. It comes back empty."""

    host: HostId
    at_s: float
    notice_s: float
    """Time from `at_s` until the server notices it."""
    restart_s: float
    """Time from the notice until the host's workers join again."""


class WireCut(Struct, frozen=True, tag=True, kw_only=True):
    """The wire between two hosts is down for `for_s`: copies on it fail."""

    one: HostId
    other: HostId
    at_s: float
    for_s: float


class StoreFault(Struct, frozen=True, tag=True, kw_only=True):
    """A tier's store fails. No request fails from it: blocks are not stored, or become cache misses."""

    host: HostId
    tier: str
    what: StoreTrouble
    """`full`: every write is refused. `down`: every read and write is refused. `slow`: they take ten times as long.

    Two kinds act once, at `at_s`. `damaged`: every other block has a bit flipped. `lost`: all blocks are gone."""
    at_s: float
    for_s: float
    """Duration of `full`, `down` and `slow`."""


class StartsFail(Struct, frozen=True, tag=True, kw_only=True):
    """Workers that scaling requests cannot start for `for_s`: no capacity is free, or the model does not load."""

    at_s: float
    for_s: float


class Herd(Struct, frozen=True, tag=True, kw_only=True):
    """No client reaches the server for `for_s`. All requests of that time arrive together at its end."""

    at_s: float
    for_s: float


Fault = Kill | KillAtStep | Hang | Slow | DelaySpike | Cancel | Flip | HostKill | WireCut | StoreFault | StartsFail
"""Faults that `FaultInjector` performs. A herd is not among them, because it only changes arrival times."""
TimedFault = Kill | Hang | Slow | DelaySpike | Flip | HostKill | WireCut | StoreFault | StartsFail | Herd
"""Faults that a file for `baton sim --faults` may hold. They strike at a time, not at a state of a request."""

EVERYWHERE = (DelaySpike, StartsFail, Herd)
"""Faults that name no worker or host: they strike every cell."""


def select_herds(faults: Iterable[TimedFault]) -> list[Herd]:
    """Return the herds in order of time."""
    return sorted((fault for fault in faults if isinstance(fault, Herd)), key=lambda herd: herd.at_s)


def delayed_arrival_s(at_s: float, herds: Sequence[Herd]) -> float:
    """Return when a request that was sent at `at_s` reaches the server.

    `herds` must be in order of time, because the end of one may lie within the next.
    """
    for herd in herds:
        if herd.at_s <= at_s < herd.at_s + herd.for_s:
            at_s = herd.at_s + herd.for_s
    return at_s
