"""What can go wrong in a simulated cluster, as plain data: written into a scenario, replayed from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from baton.core.types import HostId, RequestId, Role, WorkerId

KillMoment = Literal["during", "after"]
"""In the step, with half of it written; or right after, with its report under way."""
ReportsFate = Literal["delivered", "lost", "late"]
"""What becomes of a dead worker's last messages: they arrive before its death is noticed, never, or after that."""
StoreTrouble = Literal["full", "down", "slow", "damaged", "lost"]
Stage = Literal["arrived", "prefilling", "handed_off", "decoding"]


class Death(Struct, frozen=True, kw_only=True):
    """How the end of a process becomes known, and what comes after it."""

    reports: ReportsFate = "delivered"
    notice_s: float = 0.0
    """From its death until the server knows."""
    restart_s: float = 0.0
    """From then until a new process under the same id has joined."""
    late_s: float = 0.0
    """How long after its death its last messages arrive at the earliest, where they are late."""


class Kill(Struct, frozen=True, tag=True, kw_only=True):
    """The process is killed, wherever it is."""

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
    """The process stops doing anything; after a silence the server kills it."""

    worker: WorkerId
    at_s: float
    silent_s: float
    death: Death = Death()


class Slow(Struct, frozen=True, tag=True, kw_only=True):
    """Steps take longer for a while."""

    worker: WorkerId
    at_s: float
    for_s: float
    factor: float


class DelaySpike(Struct, frozen=True, tag=True, kw_only=True):
    """Every message sent in this time takes longer."""

    at_s: float
    for_s: float
    delay_s: float


class Cancel(Struct, frozen=True, tag=True, kw_only=True):
    """A client hangs up some time after its request has come this far."""

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
    """From then until the server knows."""
    restart_s: float
    """From then until its workers have joined again."""


class WireCut(Struct, frozen=True, tag=True, kw_only=True):
    """The wire between two hosts is down for a while: what is on it fails."""

    one: HostId
    other: HostId
    at_s: float
    for_s: float


class StoreFault(Struct, frozen=True, tag=True, kw_only=True):
    """A tier's store misbehaves. No request fails from it: blocks are not kept, or become misses."""

    host: HostId
    tier: str
    what: StoreTrouble
    """It keeps nothing more, answers nothing but no, takes ten times as long; or, at once: every other block has a bit
    flipped, or is gone without a word."""
    at_s: float
    for_s: float
    """How long it is full, down or slow."""


class StartsFail(Struct, frozen=True, tag=True, kw_only=True):
    """No worker that scaling asks for can be started for a while: there is no room, or its model does not load."""

    at_s: float
    for_s: float


class Herd(Struct, frozen=True, tag=True, kw_only=True):
    """No client reaches the server for a while. All requests of that time arrive together at its end."""

    at_s: float
    for_s: float


Fault = Kill | KillAtStep | Hang | Slow | DelaySpike | Cancel | Flip | HostKill | WireCut | StoreFault | StartsFail
"""Faults of a running cluster. A herd is none of them: it changes arrival times only."""
TimedFault = Kill | Hang | Slow | DelaySpike | Flip | HostKill | WireCut | StoreFault | StartsFail | Herd
"""What a file for `baton sim --faults` may hold: it strikes at a time, whatever a request or a worker is at."""

EVERYWHERE = (DelaySpike, StartsFail, Herd)
"""Faults that name no worker or host: they strike every cell."""


def select_herds(faults: Iterable[TimedFault]) -> list[Herd]:
    """Pick the herds, in the order of time."""
    return sorted((fault for fault in faults if isinstance(fault, Herd)), key=lambda herd: herd.at_s)


def delayed_arrival_s(at_s: float, herds: Sequence[Herd]) -> float:
    """Return when a request of time `at_s` reaches the server.

    `herds` are in order of time, because the end of one may lie within the next.
    """
    for herd in herds:
        if herd.at_s <= at_s < herd.at_s + herd.for_s:
            at_s = herd.at_s + herd.for_s
    return at_s
