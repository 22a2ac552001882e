"""Virtual time: a heap of things to do, and links on which messages take time but never overtake each other."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import add
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Action = Callable[[], None]
Message = TypeVar("Message")
STEP_ENDS = -1
"""Rank of what a worker does at the end of a step: before everything else of that moment."""
_DRAWS = 256
ARRAY_MIN = 64
"""Numbers from which on an array is quicker than a loop. Both compute the same."""
WORLD = 0
"""Rank of arrivals, faults and everything else that is no message."""


@dataclass(slots=True)
class EventLoop:
    """The event heap of a simulation.

    What happens in one moment happens by rank: ends of steps, the world, then one link after the other; within a rank,
    in the order in which it was scheduled. So the order does not depend on when something was known to come.
    """

    now_s: float = 0.0
    events: int = 0
    """Events so far."""
    _heap: list[tuple[float, int, int, Action]] = field(default_factory=list[tuple[float, int, int, Action]])
    _scheduled: int = 0
    _links: int = 0

    @property
    def is_empty(self) -> bool:
        """Nothing is left to do."""
        return not self._heap

    def at(self, when_s: float, action: Action, rank: int = WORLD) -> None:
        """Do something at a time, or now where the time has passed."""
        self._scheduled += 1
        now_s = self.now_s
        heapq.heappush(self._heap, (when_s if when_s > now_s else now_s, rank, self._scheduled, action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def link_rank(self) -> int:
        """Give a new link its place among what happens in one moment."""
        self._links += 1
        return self._links

    def run(self, *, until_s: float, events_max: int, after_each: Action) -> bool:
        """Work until nothing is left (True), or until the time or the events are used up (False)."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            when_s, _, _, action = pop(heap)
            if when_s > until_s or self.events >= events_max:
                return False
            self.now_s = when_s
            self.events += 1
            action()
            after_each()
        return True


@dataclass(slots=True)
class Spike:
    """What is added to the delay of every message that is sent now, on all links of a cluster."""

    delay_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Delays:
    """How long the messages of one link take: uniform between two bounds, drawn in the order of the messages."""

    min_s: float
    max_s: float
    draw: np.random.Generator
    spike: Spike
    _drawn: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    _drawn_s: list[float] = field(default_factory=list[float])
    """The same numbers, which are quicker to take one by one from a list."""
    _taken: int = 0
    """How many of them are used."""

    def after(self, sent_s: float) -> float:
        """Draw a delay, and return when it is over."""
        if self._taken == len(self._drawn_s):
            self._draw(1)
        self._taken += 1
        return sent_s + (self._drawn_s[self._taken - 1] + self.spike.delay_s)

    def after_each(self, sent_s: array[float]) -> npt.NDArray[np.float64] | list[float]:
        """Draw a delay for each time, and return when each is over."""
        count = len(sent_s)
        if self._taken + count > len(self._drawn_s):
            self._draw(count)
        begin, self._taken = self._taken, self._taken + count
        if count >= ARRAY_MIN:
            return np.frombuffer(sent_s) + (self._drawn[begin : begin + count] + self.spike.delay_s)
        spike_s = self.spike.delay_s
        return list(map(add, sent_s, [delay_s + spike_s for delay_s in self._drawn_s[begin : begin + count]]))

    def _draw(self, count: int) -> None:
        """Draw many at once, which is quicker; keep what is not used yet."""
        more = self.min_s + (self.max_s - self.min_s) * self.draw.random(count + _DRAWS)
        self._drawn = np.concatenate((self._drawn[self._taken :], more))
        self._drawn_s, self._taken = self._drawn.tolist(), 0


@dataclass(slots=True, kw_only=True)
class Link(Generic[Message]):
    """One direction of a connection: messages arrive in the order in which they were sent, each after its delay."""

    loop: EventLoop
    delays: Delays
    """Its own: they are drawn in the order of its messages, whenever somebody asks."""
    deliver: Callable[[Message], None]
    drained_at_s: float = 0.0
    """When the last message sent so far arrives."""
    in_flight: int = 0
    in_flight_max: int = 0
    """Most messages that were ever under way at once."""
    _closed: bool = False
    _held_until_s: float = 0.0
    _rank: int = field(init=False)

    def __post_init__(self) -> None:
        self._rank = self.loop.link_rank()

    def send(self, message: Message) -> None:
        """Send a message; lost without a sound once the link is closed."""
        if not self._closed:
            self.drained_at_s = max(self.drained_at_s, self.delays.after(self.loop.now_s))
            self.post(message, self.drained_at_s)

    def arrivals_s(self, sent_s: array[float]) -> array[float]:
        """Draw when the next messages arrive. Whoever asks, sends them: with `post`, or as part of a later one."""
        delayed_s = self.delays.after_each(sent_s)
        delayed_s[0] = max(delayed_s[0], self.drained_at_s)
        if isinstance(delayed_s, list):
            arrivals_s = array("d", accumulate(delayed_s, max))
        else:
            arrivals_s = array("d", np.maximum.accumulate(delayed_s).tobytes())
        self.drained_at_s = arrivals_s[-1]
        return arrivals_s

    def post(self, message: Message, arrives_s: float) -> None:
        """Let a message arrive at a time that `arrivals_s` gave."""
        self.in_flight += 1
        if self.in_flight > self.in_flight_max:
            self.in_flight_max = self.in_flight
        self.loop.at(arrives_s, partial(self._arrive, message), self._rank)

    def close(self) -> None:
        """Lose what is under way and what comes later."""
        self._closed = True

    def hold(self, until_s: float) -> None:
        """Let nothing arrive before a time; the order stays."""
        self._held_until_s = until_s

    def _arrive(self, message: Message) -> None:
        if self.loop.now_s < self._held_until_s:
            self.loop.at(self._held_until_s, partial(self._arrive, message), self._rank)
            return
        self.in_flight -= 1
        if not self._closed:
            self.deliver(message)
