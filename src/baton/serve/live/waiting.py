"""Deadlines of requests that wait because no worker is available, or because they are in the queue."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.ticking import QueuedTooLong, WaitedTooLong
from baton.core.types import HostId, WorkerId
from baton.decide.control.cluster import Cluster
from baton.move.clock import now_s
from baton.serve.host.worker_link import WorkerLink

TOKEN_S = 600.0
"""Seconds that a host has, after it got its token, to reserve its arena, start its mover and present the token."""


class Connection(Protocol):
    """A connection of an agent."""

    def dismiss(self, reason: str) -> None: ...


@dataclass(slots=True)
class Arrivals:
    """Tracks the hosts that are about to join. While there is one, requests may wait longer for a worker."""

    tokens: OrderedDict[str, float] = field(default_factory=OrderedDict[str, float])
    """Tokens of hosts that asked to join, and the time at which each was issued."""
    unauthenticated: set[Connection] = field(default_factory=set[Connection])
    """Connections that have not presented a token."""
    without_workers: set[HostId] = field(default_factory=set[HostId])
    """Joined hosts that have not announced a worker yet."""

    @property
    def is_any(self) -> bool:
        """Return whether a host may join soon. Connections without a token count only while some token is valid."""
        asked = any(now_s() - given_s <= TOKEN_S for given_s in self.tokens.values())
        return (asked and bool(self.unauthenticated)) or bool(self.without_workers)


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a request may wait for a worker, in seconds."""

    wait_s: float
    start_s: float
    """Additional time that applies while a worker starts or a host joins."""


class Waiting(Protocol):
    """The part of the driver that `WaitTimers` uses."""

    arrivals: Arrivals
    cluster: Cluster

    @property
    def links(self) -> Mapping[WorkerId, WorkerLink]: ...

    def tell(self, event: WaitedTooLong | QueuedTooLong) -> None: ...


class WaitTimers:
    """Tells the cluster when the oldest request that waits for a worker, or in the queue, is overdue."""

    def __init__(self, driver: Waiting, waits: Waits) -> None:
        self._driver = driver
        self._waits = waits
        self._timer: asyncio.TimerHandle | None = None
        self._queue_timer: asyncio.TimerHandle | None = None

    def reset_timer(self) -> None:
        """Set the timer again. Call it when a request begins to wait or when the time limit may have changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        since_s = self._driver.cluster.coordinator.waiting_since_s
        if since_s is not None:
            limit_s = self._limit_s()
            left_s = max(0.0, since_s + limit_s - now_s())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._reject_waiting, limit_s)

    def _limit_s(self) -> float:
        driver, waits = self._driver, self._waits
        starts = driver.arrivals.is_any or any(link.state == "starting" for link in driver.links.values())
        starts = starts or driver.cluster.coordinator.reshaping.waits_for_hosts
        return waits.wait_s + waits.start_s if starts else waits.wait_s

    def _reject_waiting(self, limit_s: float) -> None:
        if limit_s == self._limit_s():
            self._driver.tell(WaitedTooLong(limit_s))
        self.reset_timer()

    def set_queue_timer(self) -> None:
        """Set the queue's timer, if the queue has a request and the timer is not set."""
        if self._queue_timer is not None:
            return
        check_s = self._driver.cluster.coordinator.queue.next_check_s(now_s())
        if check_s is not None:
            left_s = max(0.0, check_s - now_s())
            self._queue_timer = asyncio.get_running_loop().call_later(left_s, self._reject_overdue)

    def _reject_overdue(self) -> None:
        self._queue_timer = None
        if self._driver.cluster.coordinator.queue.is_overdue(now_s()):
            self._driver.tell(QueuedTooLong())
        self.set_queue_timer()
