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
class _Passage:
    """A scheduled copy."""

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
    """Tokens whose KV has landed completely, that is, to the last layer."""
    _sending_until_s: dict[HostId, float] = field(default_factory=dict[HostId, float])
    _receiving_until_s: dict[HostId, float] = field(default_factory=dict[HostId, float])
    _under_way: dict[int, CopyBlocks] = field(default_factory=dict[int, CopyBlocks])
    _passages: dict[int, _Passage] = field(default_factory=dict[int, _Passage])
    """Copies under way on intact wires, in order of arrival."""
    _cuts: list[frozenset[HostId]] = field(default_factory=list[frozenset[HostId]])

    @property
    def under_way(self) -> tuple[CopyBlocks, ...]:
        """Copies that have begun and not ended."""
        return tuple(self._under_way.values())

    def begin(self, copy: CopyBlocks) -> None:
        """Begin a copy: schedule it behind the copies of its two hosts, or let it fail if the wire is cut."""
        self._under_way[copy.number] = copy
        if frozenset((copy.source, copy.target)) in self._cuts:
            self.loop.after(REFUSED_S, partial(self._end, copy, landed=False))
            return
        passage = self._passages[copy.number] = _Passage(copy, self.seconds(copy))
        self._line_up(passage)

    def _line_up(self, passage: _Passage) -> None:
        """Schedule a copy behind the copies that its source sends and its target receives."""
        sending_s, receiving_s = self._sending_until_s, self._receiving_until_s
        source, target = passage.copy.source, passage.copy.target
        passage.begins_s = max(self.loop.now_s, sending_s.get(source, 0.0), receiving_s.get(target, 0.0))
        passage.ends_s = sending_s[source] = receiving_s[target] = passage.begins_s + passage.alone_s
        self.loop.at(passage.ends_s, partial(self._arrive, passage, passage.ends_s))

    def _arrive(self, passage: _Passage, ends_s: float) -> None:
        if passage.ends_s == ends_s:  # otherwise the copy was rescheduled to an earlier end
            self._end(passage.copy, landed=True)

    def cut(self, one: HostId, other: HostId) -> None:
        """Cut the wire between two hosts. Copies on it fail, and so do new ones until `mend`."""
        ends = frozenset((one, other))
        self._cuts.append(ends)
        self._fail([copy for copy in self._under_way.values() if frozenset((copy.source, copy.target)) == ends])

    def mend(self, one: HostId, other: HostId) -> None:
        self._cuts.remove(frozenset((one, other)))

    def lose_host(self, host: HostId) -> None:
        """Fail every copy from or to a lost host."""
        self._fail([copy for copy in self._under_way.values() if host in (copy.source, copy.target)])

    def _fail(self, copies: list[CopyBlocks]) -> None:
        for copy in copies:
            self._passages.pop(copy.number, None)
        self._move_up()
        for copy in copies:
            self._end(copy, landed=False)

    def _move_up(self) -> None:
        """Reschedule waiting copies into the time that failed copies had reserved. Started copies do not change."""
        self._sending_until_s.clear()
        self._receiving_until_s.clear()
        for passage in self._passages.values():
            if passage.begins_s > self.loop.now_s:
                self._line_up(passage)
            else:
                source, target = passage.copy.source, passage.copy.target
                self._sending_until_s[source] = self._receiving_until_s[target] = passage.ends_s

    def _end(self, copy: CopyBlocks, *, landed: bool) -> None:
        if self._under_way.pop(copy.number, None) is None:
            return  # it failed before
        self._passages.pop(copy.number, None)
        if landed:
            self.copies += 1
            if copy.layers is None or copy.layers.end == copy.layers.total:
                self.tokens += copy.tokens
        self.ended(copy, landed)
