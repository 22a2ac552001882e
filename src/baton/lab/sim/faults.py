"""Faults of a simulated cluster, as plain data in scenarios and in the files of `baton sim --faults`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.files import form_of, in_file, keys_of
from baton.core.types import HostId, Role, WorkerId
from baton.core.validation import Check, did_you_mean, type_problems
from baton.lab.sim.spec import ClusterSpec

ReportsFate = Literal["delivered", "lost", "late"]
"""When a dead worker's last messages arrive: before the server notices the death, never, or after it noticed."""
StoreTrouble = Literal["full", "down", "slow", "damaged", "lost"]
MessageTrouble = Literal["lost", "repeated"]


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


class Hang(Struct, frozen=True, tag=True, kw_only=True):
    """The process stops responding. The server kills it after `silent_s`."""

    worker: WorkerId
    at_s: float
    silent_s: float
    death: Death = Death()


class MessageFault(Struct, frozen=True, tag=True, kw_only=True):
    """The next control message between the server and a worker is lost, or arrives twice.

    Messages are numbered, so the receiver drops a repeated one. It notices a lost one at the next message, and then
    treats the process as dead.
    """

    worker: WorkerId
    at_s: float
    link: Literal["to_worker", "from_worker"]
    what: MessageTrouble
    ping_s: float = 0.5
    """Time until a ping shows the loss, if no other message does before."""
    death: Death = Death()


class Slow(Struct, frozen=True, tag=True, kw_only=True):
    """Steps of a worker that begin within `for_s` take `factor` times as long."""

    worker: WorkerId
    at_s: float
    for_s: float
    factor: float


class DelaySpike(Struct, frozen=True, tag=True, kw_only=True):
    """Every message that is sent within `for_s` takes `delay_s` longer."""

    at_s: float
    for_s: float
    delay_s: float


class Flip(Struct, frozen=True, tag=True, kw_only=True):
    """An operator changes a worker's role."""

    worker: WorkerId
    at_s: float
    role: Role


class Restart(Struct, frozen=True, tag=True, kw_only=True):
    """An administrator begins a rolling restart of all workers. Each is back after the cluster's `worker_start_s`."""

    at_s: float


class HostKill(Struct, frozen=True, tag=True, kw_only=True):
    """A whole host goes down: its workers, its KV and its wires. It comes back empty."""

    host: HostId
    at_s: float
    notice_s: float
    """Time from `at_s` until the server notices it."""
    restart_s: float
    """Time from the notice until the host's workers join again."""


class HostLeave(Struct, frozen=True, tag=True, kw_only=True):
    """A host is told to end. It ends when its requests have moved, at the latest after `drain_s`.

    It returns empty, and its workers join again after the cluster's `worker_start_s`.
    """

    host: HostId
    at_s: float
    drain_s: float = 10.0


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


WorkerFault = Kill | Hang | MessageFault | Slow | Flip
Fault = WorkerFault | DelaySpike | Restart | HostKill | HostLeave | WireCut | StoreFault | StartsFail
"""Faults that `FaultInjector` performs. A herd is not among them, because it only changes arrival times."""
TimedFault = Fault | Herd
"""Faults that a file for `baton sim --faults` may hold: they happen at a time, not at a state of a request."""

EVERYWHERE = (DelaySpike, StartsFail, Restart, Herd)
"""Faults that name no worker or host: they happen in every cell."""


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


class FaultFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Top-level keys of the file."""

    faults: tuple[TimedFault, ...]


def read_faults(path: Path, spec: ClusterSpec) -> tuple[TimedFault, ...]:
    """Return the faults of a `.toml`, `.yaml` or `.json` file for a cluster.

    Raises ConfigError with every problem, each with the file's name.
    """
    with in_file(path, "the faults"):
        raw = keys_of(path.read_text(encoding="utf-8"), form_of(path), example="the key `faults` with the list of them")
        problems = _problems(raw, spec)
        if problems:
            raise ConfigError("\n".join(problems))
        return msgspec.convert(raw, FaultFile).faults


def fault_problems(faults: Sequence[TimedFault], spec: ClusterSpec) -> list[str]:
    """Return the reasons why faults do not fit this cluster: unknown names, and times or factors out of range."""
    return _problems(msgspec.to_builtins(FaultFile(tuple(faults))), spec)


def _problems(raw: dict[str, Any], spec: ClusterSpec) -> list[str]:
    found = type_problems(raw, FaultFile, check=_check(spec))
    if found or spec.cells == 1:
        return found
    return _cell_problems(msgspec.convert(raw, FaultFile).faults, spec.cells)


def _cell_problems(faults: Sequence[TimedFault], cells: int) -> list[str]:
    """Return an error for each fault that names a worker or host: with several cells, the name is ambiguous."""
    why = f"names a worker or a host, but each of the {cells} cells has one of that name"
    instead = f"simulate one cell: cells = 1 and 1/{cells} of the requests"
    return [
        f"faults[{place}]: a {type(fault).__name__} {why}; {instead}"
        for place, fault in enumerate(faults)
        if not isinstance(fault, EVERYWHERE)
    ]


def _check(spec: ClusterSpec) -> Check:
    """Return a check that names exist in the cluster and that times and factors are in range."""
    hosts = [*spec.hosts()]
    known: dict[str, Sequence[str]] = {
        "worker": [view.id for view in spec.views()],
        "host": hosts,
        "one": hosts,
        "other": hosts,
        "tier": [tier.name for tier in spec.tiers],
    }

    def check(place: str, value: object) -> list[str]:
        key = place.rpartition(".")[2]
        if isinstance(value, str) and value not in known.get(key, [value]):
            there = ", ".join(known[key][:8]) or "none"
            return [f"{place}: there is no {value!r}{did_you_mean(value, known[key])}, there is {there}"]
        if isinstance(value, float | int):
            return _number_problems(place, key, value)
        return []

    return check


def _number_problems(place: str, key: str, value: float) -> list[str]:
    if key.endswith("_s") and not 0 <= value < math.inf:
        return [f"{place} is {value}: it must be a time of 0 s or more"]
    if key == "factor" and not 0 < value < math.inf:
        return [f"{place} is {value}: it must be above 0; 2.0 makes steps take twice as long"]
    return []
