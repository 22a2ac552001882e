"""Virtual time: an event heap, and links that deliver messages after a delay and in order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Action = Callable[[], None]
Message = TypeVar("Message")
STEP_ENDS = -1
"""Rank of the end of a worker's step: it precedes all other events of the same time."""
_DRAWS = 2048
"""Delays that a link draws at a time: 16 KiB."""
_ROUNDING_S = 1e-9
"""Float tolerance, larger than the rounding error of a sum of delays."""
ARRAY_MIN = 64
"""Length from which NumPy is faster than a loop. Both give the same results."""
WORLD = 0
"""Rank of arrivals, faults and every other event that is neither a message nor the end of a step."""


@dataclass(slots=True)
class EventLoop:
    """The event heap of a simulation.

    Events of the same time run in order of rank: ends of steps, `WORLD`, then one link after the other. Events of the
    same rank run in the order in which they were scheduled. So the order across ranks does not depend on the order of
    scheduling.
    """

    now_s: float = 0.0
    events: int = 0
    """Events run so far."""
    ticks: int = 0
    """Scheduled ticks, which alone do not keep a simulation going."""
    _heap: list[tuple[float, int, int, Action]] = field(default_factory=list[tuple[float, int, int, Action]])
    _number: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    """Returns the next sequence number, the tie-break between events of the same time and rank."""
    _links: int = 0

    @property
    def has_only_ticks(self) -> bool:
        """No other event is scheduled."""
        return len(self._heap) == self.ticks

    def at(self, when_s: float, action: Action, rank: int = WORLD) -> None:
        """Schedule an action at a time, or now if that time has passed."""
        if when_s < self.now_s:
            when_s = self.now_s
        heappush(self._heap, (when_s, rank, self._number(), action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def link_rank(self) -> int:
        """Return a rank for a new link. Each link has its own, so that events of the same time have a fixed order."""
        self._links += 1
        return self._links

    def run(self, *, until_s: float, events_max: int, after_each: Action | None = None) -> bool:
        """Run events until none is left (True), or until a limit of time or events is reached (False)."""
        heap, pop, events = self._heap, heappop, self.events
        try:
            while heap:
                when_s, _, _, action = pop(heap)
                if when_s > until_s or events >= events_max:
                    return False
                self.now_s = when_s
                events += 1
                action()
                if after_each is not None:
                    self.events = events
                    after_each()
        finally:
            self.events = events
        return True


@dataclass(slots=True)
class ExtraDelay:
    """The extra delay of messages on all links of a cluster. It applies to messages that are sent from now on."""

    delay_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Delays:
    """The delays of one link's messages: uniform between two bounds, drawn in the order of the messages."""

    min_s: float
    max_s: float
    draw: np.random.Generator
    spike: ExtraDelay
    _drawn: array[float] = field(default_factory=lambda: array("d"))
    _taken: int = 0
    """Number of delays of `_drawn` that are used."""

    def next_s(self) -> float:
        """Return the delay of the next message."""
        taken = self._taken
        if taken == len(self._drawn):
            self._draw(1)
            taken = 0
        self._taken = taken + 1
        return self._drawn[taken] + self.spike.delay_s

    def several(self, sent_s: array[float], begin: int, end: int, drained_s: float) -> MessageBatch:
        """Draw delays of messages that are sent at `sent_s[begin:end]`. None of them arrives before `drained_s`."""
        messages = end - begin
        if self._taken + messages > len(self._drawn):
            self._draw(messages)
        first, self._taken = self._taken, self._taken + messages
        last, spike_s, drawn_s = self._taken - 1, self.spike.delay_s, self._drawn
        last_s = max(drained_s, sent_s[end - 1] + (drawn_s[last] + spike_s))
        slowest_s = self.max_s + spike_s + _ROUNDING_S
        for index in range(end - 2, begin - 1, -1):
            if sent_s[index] + slowest_s <= last_s:
                break
            last -= 1
            last_s = max(last_s, sent_s[index] + (drawn_s[last] + spike_s))
        return MessageBatch(messages, drawn_s[first : self._taken], spike_s, drained_s, last_s)

    def _draw(self, messages: int) -> None:
        """Draw many delays at once, which is faster, and keep the unused ones."""
        more = self.min_s + (self.max_s - self.min_s) * self.draw.random(messages + _DRAWS)
        self._drawn = self._drawn[self._taken :] + array("d", more.tobytes())
        self._taken = 0


class MessageBatch(Struct, frozen=True, gc=False):
    """Messages sent one after the other. `arrival_times_s` computes their arrival times on demand."""

    messages: int
    drawn_s: array[float]
    """Their delays, without `spike_s`."""
    spike_s: float
    """Extra delay of each message."""
    behind_s: float
    """Earliest time at which any of them can arrive."""
    last_s: float
    """Time at which the last of them arrives."""


def arrival_times_s(sent_s: array[float], batches: Sequence[MessageBatch]) -> array[float]:
    """Return the arrival time of every message. `sent_s` holds their send times, in the order of the batches."""
    if len(sent_s) < ARRAY_MIN:
        return _one_by_one(sent_s, batches)
    delays_s = [_delays_s(batch) for batch in batches]
    arrives_s = (np.concatenate(delays_s) if len(batches) > 1 else delays_s[0]) + np.frombuffer(sent_s)
    begin = 0
    for batch in batches:
        if arrives_s.item(begin) < batch.behind_s:
            arrives_s[begin] = batch.behind_s
        begin += batch.messages
    return array("d", np.maximum.accumulate(arrives_s, out=arrives_s).tobytes())


def _delays_s(batch: MessageBatch) -> npt.NDArray[np.float64]:
    drawn_s = np.frombuffer(batch.drawn_s)
    return drawn_s + batch.spike_s if batch.spike_s else drawn_s


def _one_by_one(sent_s: array[float], batches: Sequence[MessageBatch]) -> array[float]:
    found_s, sent = array("d"), iter(sent_s)
    for batch in batches:
        latest_s, spike_s = batch.behind_s, batch.spike_s
        for drawn_s, at_s in zip(batch.drawn_s, sent, strict=False):
            arrives_s = at_s + (drawn_s + spike_s)
            if arrives_s > latest_s:
                latest_s = arrives_s
            found_s.append(latest_s)
    return found_s


@dataclass(slots=True, kw_only=True)
class MessageLink(Generic[Message]):
    """One direction of a connection: messages arrive in the order in which they were sent, each after its delay."""

    loop: EventLoop
    delays: Delays
    """Delays of this link only, drawn in the order of its messages."""
    deliver: Callable[[Message], None]
    drained_at_s: float = 0.0
    """Time at which the last message sent so far arrives."""
    in_flight: int = 0
    in_flight_max: int = 0
    """Highest number of messages that were under way at once."""
    _closed: bool = False
    _held_until_s: float = 0.0
    _rank: int = field(init=False)

    def __post_init__(self) -> None:
        self._rank = self.loop.link_rank()

    def send(self, message: Message) -> None:
        """Send a message. A closed link drops it silently."""
        if not self._closed:
            arrives_s = self.loop.now_s + self.delays.next_s()
            if arrives_s < self.drained_at_s:
                arrives_s = self.drained_at_s
            self.drained_at_s = arrives_s
            self.post(message, arrives_s)

    def begin(self, sent_s: array[float], begin: int, end: int) -> MessageBatch:
        """Draw the delays of messages that are sent at `sent_s[begin:end]`, without scheduling their delivery.

        The caller delivers them once their arrival times are known: with `post`, or as part of a later message.
        """
        batch = self.delays.several(sent_s, begin, end, self.drained_at_s)
        self.drained_at_s = batch.last_s
        return batch

    def post(self, message: Message, arrives_s: float) -> None:
        """Schedule a message to arrive at a known time."""
        in_flight = self.in_flight = self.in_flight + 1
        if in_flight > self.in_flight_max:
            self.in_flight_max = in_flight
        self.loop.at(arrives_s, partial(self._arrive, message), self._rank)

    def close(self) -> None:
        """Drop all messages that are under way or sent later."""
        self._closed = True

    def hold(self, until_s: float) -> None:
        """Delay messages that would arrive before `until_s` to that time, in the same order."""
        self._held_until_s = until_s

    def _arrive(self, message: Message) -> None:
        if self.loop.now_s < self._held_until_s:
            self.loop.at(self._held_until_s, partial(self._arrive, message), self._rank)
            return
        self.in_flight -= 1
        if not self._closed:
            self.deliver(message)
