"""Wires between simulated hosts. The cost model gives a copy's duration; a host sends and receives one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.core.copies import CopyBlocks
from baton.core.types import HostId
from baton.lab.sim.loop import EventLoop

REFUSED_S = 0.01
"""Time until a copy over a cut wire fails."""


@dataclass(slots=True)
class _ScheduledCopy:
    """A copy, its duration alone on the wire, and its planned start and end."""

    copy: CopyBlocks
    alone_s: float
    begins_s: float = 0.0
    ends_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Wires:
    """Schedules copies between hosts. It calls `ended` once for every copy, with True if the copy landed."""

    loop: EventLoop
    seconds: Callable[[CopyBlocks], float]
    """Returns the duration of a copy that is alone on the wire."""
    ended: Callable[[CopyBlocks, bool], None]
    copies: int = 0
    """Number of copies that landed."""
    tokens: int = 0
    """Tokens whose KV has landed in all layers."""
    _sending_until_s: dict[HostId, float] = field(default_factory=dict[HostId, float])
    _receiving_until_s: dict[HostId, float] = field(default_factory=dict[HostId, float])
    _under_way: dict[int, CopyBlocks] = field(default_factory=dict[int, CopyBlocks])
    _scheduled: dict[int, _ScheduledCopy] = field(default_factory=dict[int, _ScheduledCopy])
    """Copies under way on intact wires, in order of arrival."""
    _cut_wires: list[frozenset[HostId]] = field(default_factory=list[frozenset[HostId]])

    @property
    def under_way(self) -> tuple[CopyBlocks, ...]:
        """Copies that have begun and not ended."""
        return tuple(self._under_way.values())

    def begin(self, copy: CopyBlocks) -> None:
        """Begin a copy: schedule it behind the copies of its two hosts, or let it fail if the wire is cut."""
        self._under_way[copy.number] = copy
        if frozenset((copy.source, copy.target)) in self._cut_wires:
            self.loop.after(REFUSED_S, partial(self._end, copy, landed=False))
            return
        scheduled = self._scheduled[copy.number] = _ScheduledCopy(copy, self.seconds(copy))
        self._schedule(scheduled)

    def _schedule(self, scheduled: _ScheduledCopy) -> None:
        """Schedule a copy behind the copies that its source sends and its target receives."""
        sending_s, receiving_s = self._sending_until_s, self._receiving_until_s
        source, target = scheduled.copy.source, scheduled.copy.target
        scheduled.begins_s = max(self.loop.now_s, sending_s.get(source, 0.0), receiving_s.get(target, 0.0))
        scheduled.ends_s = sending_s[source] = receiving_s[target] = scheduled.begins_s + scheduled.alone_s
        self.loop.at(scheduled.ends_s, partial(self._arrive, scheduled, scheduled.ends_s))

    def _arrive(self, scheduled: _ScheduledCopy, ends_s: float) -> None:
        if scheduled.ends_s == ends_s:  # otherwise the copy was rescheduled to an earlier end
            self._end(scheduled.copy, landed=True)

    def cut(self, one: HostId, other: HostId) -> None:
        """Cut the wire between two hosts. Copies on it fail, and so do new ones until `mend`."""
        ends = frozenset((one, other))
        self._cut_wires.append(ends)
        self._fail([copy for copy in self._under_way.values() if frozenset((copy.source, copy.target)) == ends])

    def mend(self, one: HostId, other: HostId) -> None:
        self._cut_wires.remove(frozenset((one, other)))

    def lose_host(self, host: HostId) -> None:
        """Fail every copy from or to a lost host."""
        self._fail([copy for copy in self._under_way.values() if host in (copy.source, copy.target)])

    def _fail(self, copies: list[CopyBlocks]) -> None:
        for copy in copies:
            self._scheduled.pop(copy.number, None)
        self._reschedule_waiting()
        for copy in copies:
            self._end(copy, landed=False)

    def _reschedule_waiting(self) -> None:
        """Reschedule waiting copies into the time that failed copies had reserved. Started copies do not change."""
        self._sending_until_s.clear()
        self._receiving_until_s.clear()
        for scheduled in self._scheduled.values():
            if scheduled.begins_s > self.loop.now_s:
                self._schedule(scheduled)
            else:
                source, target = scheduled.copy.source, scheduled.copy.target
                self._sending_until_s[source] = self._receiving_until_s[target] = scheduled.ends_s

    def _end(self, copy: CopyBlocks, *, landed: bool) -> None:
        if self._under_way.pop(copy.number, None) is None:
            return  # it failed before
        self._scheduled.pop(copy.number, None)
        if landed:
            self.copies += 1
            if copy.layers is None or copy.layers.end == copy.layers.total:
                self.tokens += copy.tokens
        self.ended(copy, landed)
