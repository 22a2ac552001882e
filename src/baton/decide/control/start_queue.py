"""Requests that wait for their first step, and the rate at which this queue drains.

A request first waits for KV blocks, then for a step. The server learns of the first step only from its result. So the
worker decides about an overdue request that has blocks: it drops the request unless a step has run it.

Three kinds of requests do not enter the queue: those with an SLO below the deadline, because admission predicts their
TTFT; those that may wait; and later attempts, because their clients may have text already.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from baton.core.messages import CloseRequest, StopRequest
from baton.core.types import Request, RequestId
from baton.decide.control.flight import Flight
from baton.decide.control.turn_queue import TurnQueue

ADMIT_RATIO = 0.5
"""Requests with a predicted wait above this share of the deadline are refused, so admitted ones rarely exceed it."""
OVERLOAD_RATIO = 0.25
"""No request is refused until the oldest has waited for this share of the deadline: a burst is no overload."""
STARTS_MIN = 4
"""Minimum number of starts, since the queue was last empty, to compute a rate from."""
STARTS_MAX = 64
"""Maximum number of starts, the latest ones, to compute the rate from."""
CHECK_S = 0.5
"""Seconds between two checks while a deferred request waits."""
_ROUNDING_S = 1e-6
"""Float tolerance, so that the deadline timer sees the oldest request as overdue."""


@dataclass(slots=True)
class StartQueue:
    """Rejects requests that would wait, or have waited, for longer than `wait_s_max`."""

    wait_s_max: float | None = None
    """Deadline of a request in the queue. None: there is none, except for deferred requests."""
    _since_s: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    """When each request without blocks began to wait, oldest first."""
    _granted_s: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    """When each request with blocks began to wait, until its first step is reported."""
    _deferred_s: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    """Deadlines of the deferred requests in the queue."""
    _stopping: set[RequestId] = field(default_factory=set[RequestId])
    """Overdue requests with blocks, until their worker has dropped or computed them."""
    _starts_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=STARTS_MAX))
    """Times of the latest starts since the queue was last empty."""
    _busy_since_s: float = 0.0

    @property
    def deadline_s(self) -> float | None:
        """Time when the oldest request will have waited for too long. None: no request waits."""
        if not (self._since_s or self._granted_s):
            return None
        deferred, queued = self._deferred_s, self._since_s.items()
        waits = [*(queued if deferred else islice(queued, 1)), *self._granted_s.items()]  # the oldest one is first
        return min((since_s + self._wait_s(request_id) for request_id, since_s in waits), default=None)

    def next_check_s(self, now_s: float) -> float | None:
        """Return when to look for overdue requests. None: no request waits.

        The deadline of a new request may be earlier than that of a deferred one, so checks are then more frequent.
        """
        deadline_s = self.deadline_s
        return deadline_s if deadline_s is None or not self._deferred_s else min(deadline_s, now_s + CHECK_S)

    def enter(self, request: Request, now_s: float, *, has_blocks: bool = False) -> None:
        """Record that a request waits for its turn, or was sent to its worker."""
        if not self._has_deadline(request):
            return
        if request.deferred_s:
            self._deferred_s[request.id] = request.deferred_s
        if request.id in self._since_s:
            if has_blocks:
                self.start(request.id, now_s)
            return
        if has_blocks:
            self._granted_s[request.id] = now_s
            return
        if not self._since_s:
            self._busy_since_s = now_s
            self._starts_s.clear()
        self._since_s[request.id] = now_s

    def start(self, request_id: RequestId, now_s: float) -> None:
        """Record that a request got blocks: its first step is near. Does nothing if it was not waiting for blocks."""
        since_s = self._since_s.pop(request_id, None)
        if since_s is not None:
            self._starts_s.append(now_s)
            self._granted_s[request_id] = since_s

    def lose_blocks(self, request_id: RequestId) -> None:
        """Record that a request gave its blocks back before its first step: it waits again, with the same deadline."""
        since_s = self._granted_s.pop(request_id, None)
        if since_s is not None:
            self._since_s[request_id] = since_s
            self._since_s = dict(sorted(self._since_s.items(), key=itemgetter(1)))

    def leave(self, request_id: RequestId) -> None:
        """Remove a request that was computed, has ended or lost its worker. Does nothing if it is not in the queue."""
        if not (self._since_s or self._granted_s or self._stopping):
            return  # the queue is empty
        self._since_s.pop(request_id, None)
        self._granted_s.pop(request_id, None)
        self._deferred_s.pop(request_id, None)
        self._stopping.discard(request_id)

    def is_overdue(self, now_s: float) -> bool:
        """Return whether a request has waited for too long."""
        deadline_s = self.deadline_s
        return deadline_s is not None and deadline_s <= now_s + _ROUNDING_S

    def refuse(
        self, request: Request, now_s: float, turns: TurnQueue | None = None, overtaken: int = 0
    ) -> CloseRequest | None:
        """Return the rejection of a new request whose predicted wait is too long. None: it may enter.

        `turns`: the fair queue, where a new request may have its turn before others. None: turns go by arrival.
        `overtaken`: waiting requests that it overtakes for another reason.
        """
        oldest_s = next(iter(self._since_s.values()), None)
        if oldest_s is None or not self._has_deadline(request):
            return None
        wait_s = request.deferred_s or self._wait_s(request.id)
        ahead = len(self._since_s) - overtaken
        if turns is not None and turns.waiting:
            ahead -= max(0, len(turns.waiting) - turns.ahead(request).requests)
        predicted_s = self._predicted_s(ahead, now_s)
        is_overloaded = now_s - oldest_s >= OVERLOAD_RATIO * wait_s
        if not is_overloaded or predicted_s is None or predicted_s <= ADMIT_RATIO * wait_s:
            return None
        why = f"{len(self._since_s)} requests wait, and a new request would wait for {predicted_s:.1f} s"
        return _rejection(request.id, why, predicted_s, wait_s)

    def reject_overdue(self, now_s: float) -> list[CloseRequest]:
        """Return the rejections of overdue requests without blocks. They stay in the queue until they are closed."""
        return [self._late(request_id, now_s) for request_id in self._overdue(self._since_s, now_s)]

    def stop_overdue(self, now_s: float, flights: Mapping[RequestId, Flight]) -> list[StopRequest]:
        """Return commands to stop overdue requests with blocks. A worker ignores one if a step has run the request."""
        stops: list[StopRequest] = []
        for request_id in self._overdue(self._granted_s, now_s):
            flight = flights[request_id]
            assert flight.worker is not None, f"{request_id} waits for a step without a worker"
            stops.append(StopRequest(request_id, flight.attempt, flight.worker, only_unstarted=True))
            del self._granted_s[request_id]
            self._stopping.add(request_id)
        return stops

    def dropped(self, request_id: RequestId, now_s: float) -> CloseRequest | None:
        """Return the rejection of a request that its worker has dropped for its deadline.

        None: the worker has dropped it for another reason.
        """
        return self._late(request_id, now_s) if request_id in self._stopping else None

    def _has_deadline(self, request: Request) -> bool:
        """Return whether the deadline holds for a request. Clients cannot avoid it by asking for a very long TTFT."""
        if request.may_wait or request.deferred_s:
            return not request.may_wait
        return self.wait_s_max is not None and (request.slo is None or request.slo.ttft_s > self.wait_s_max)

    def _wait_s(self, request_id: RequestId) -> float:
        """Return the deadline of a request that may be in the queue."""
        return self._deferred_s.get(request_id, math.inf if self.wait_s_max is None else self.wait_s_max)

    def _overdue(self, since_s: dict[RequestId, float], now_s: float) -> list[RequestId]:
        limit_s = now_s + _ROUNDING_S
        return [each for each, waited_from_s in since_s.items() if waited_from_s + self._wait_s(each) <= limit_s]

    def _late(self, request_id: RequestId, now_s: float) -> CloseRequest:
        wait_s = self._wait_s(request_id)
        why = f"the request has waited for {wait_s:g} s without a step"
        return _rejection(request_id, why, self._predicted_s(len(self._since_s), now_s), wait_s)

    def _predicted_s(self, ahead: int, now_s: float) -> float | None:
        """Predict how long a request behind `ahead` others waits, from the rate of starts. None: too few are known."""
        starts = len(self._starts_s)
        if starts < STARTS_MIN:
            return None
        begin_s = self._starts_s[0] if starts == STARTS_MAX else self._busy_since_s
        return (ahead + 1) * (now_s - begin_s) / starts


def _rejection(request_id: RequestId, why: str, predicted_s: float | None, wait_s: float) -> CloseRequest:
    """Return a rejection. `wait_s`: the deadline of the request."""
    left_s = wait_s if predicted_s is None else predicted_s - ADMIT_RATIO * wait_s
    reason = (
        f"the server is overloaded: {why}; the request may wait for {wait_s:g} s (limits.queue_s, or defer_s of its"
        " class); send the request again later"
    )
    return CloseRequest(request_id, "rejected", reason, "queue_deadline", max(1.0, left_s))
