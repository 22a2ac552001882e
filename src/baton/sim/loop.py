"""Virtual time: a heap of things to do, and links on which messages take time but never overtake each other."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

Action = Callable[[], None]
Message = TypeVar("Message")


@dataclass(slots=True)
class EventLoop:
    """The event heap of a simulation. Ties go to what was scheduled first, so that every run is the same."""

    now_s: float = 0.0
    events: int = 0
    """Events so far."""
    _heap: list[tuple[float, int, Action]] = field(default_factory=list[tuple[float, int, Action]])
    _scheduled: int = 0

    @property
    def is_empty(self) -> bool:
        """Nothing is left to do."""
        return not self._heap

    def at(self, when_s: float, action: Action) -> None:
        """Do something at a time, or now where the time has passed."""
        self._scheduled += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._scheduled, action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def run(self, *, until_s: float, events_max: int, after_each: Action) -> bool:
        """Work until nothing is left (True), or until the time or the events are used up (False)."""
        while self._heap:
            when_s, _, action = heapq.heappop(self._heap)
            if when_s > until_s or self.events >= events_max:
                return False
            self.now_s = when_s
            self.events += 1
            action()
            after_each()
        return True


@dataclass(slots=True, kw_only=True)
class Link(Generic[Message]):
    """One direction of a connection: messages arrive in the order in which they were sent, each after its delay."""

    loop: EventLoop
    delay_s: Callable[[], float]
    deliver: Callable[[Message], None]
    drained_at_s: float = 0.0
    """When the last message sent so far arrives."""
    in_flight: int = 0
    in_flight_max: int = 0
    """Most messages that were ever under way at once."""
    _closed: bool = False
    _held_until_s: float = 0.0

    def send(self, message: Message) -> None:
        """Send a message; lost without a sound once the link is closed."""
        if self._closed:
            return
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        self.drained_at_s = max(self.drained_at_s, self.loop.now_s + self.delay_s())
        self.loop.at(self.drained_at_s, partial(self._arrive, message))

    def close(self) -> None:
        """Lose what is under way and what comes later."""
        self._closed = True

    def hold(self, until_s: float) -> None:
        """Let nothing arrive before a time; the order stays."""
        self._held_until_s = until_s

    def _arrive(self, message: Message) -> None:
        if self.loop.now_s < self._held_until_s:
            self.loop.at(self._held_until_s, partial(self._arrive, message))
            return
        self.in_flight -= 1
        if not self._closed:
            self.deliver(message)
