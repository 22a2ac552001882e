"""Wires of the simulator: one copy at a time per host and direction, whatever fails meanwhile."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.copies import CopyBlocks
from baton.core.types import HostId, RequestId
from baton.lab.sim.loop import EventLoop
from baton.lab.sim.wires import REFUSED_S, Wires

HOSTS = ("a", "b", "c")
PAIRS = st.permutations(HOSTS).map(lambda names: (HostId(names[0]), HostId(names[1])))
COPIES = st.lists(st.tuples(st.integers(0, 40), PAIRS, st.integers(1, 20)), min_size=1, max_size=20)
"""When each is asked for, from where to where, and its seconds."""
CUTS = st.lists(st.tuples(st.integers(0, 60), PAIRS, st.integers(1, 10)), max_size=3)
LOSSES = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(HOSTS)), max_size=2)

Asked = tuple[int, tuple[HostId, HostId], int]


def copy_of(number: int, source: HostId, target: HostId, tokens: int) -> CopyBlocks:
    """A copy that takes as many seconds as it has tokens."""
    return CopyBlocks(RequestId("r"), number, source, target, (), (), 0, tokens)


def carried(
    copies: list[Asked], cuts: list[Asked], losses: list[tuple[int, str]]
) -> dict[int, tuple[float, bool, float]]:
    """When each copy was over and whether it landed, and when it was asked for; half a second apart from faults."""
    loop, ends, asked_s = EventLoop(), dict[int, tuple[float, bool]](), dict[int, float]()

    def ended(copy: CopyBlocks, landed: bool) -> None:
        assert copy.number not in ends
        ends[copy.number] = (loop.now_s, landed)

    wires = Wires(loop=loop, seconds=lambda copy: float(copy.tokens), ended=ended)
    for number, (at, (source, target), tokens) in enumerate(sorted(copies)):
        asked_s[number] = float(at)
        loop.at(at, partial(wires.begin, copy_of(number, source, target, tokens)))
    for at, (one, other), for_s in cuts:
        loop.at(at + 0.5, partial(wires.cut, one, other))
        loop.at(at + 0.5 + for_s, partial(wires.mend, one, other))
    for at, host in losses:
        loop.at(at + 0.5, partial(wires.lose_host, HostId(host)))
    assert loop.run(until_s=math.inf, events_max=10_000)
    assert not wires.under_way
    return {number: (*ends[number], asked_s[number]) for number in asked_s}


@given(COPIES, CUTS, LOSSES)
def test_a_copy_begins_when_all_before_it_on_its_wires_are_over(
    copies: list[Asked], cuts: list[Asked], losses: list[tuple[int, str]]
) -> None:
    """Those that failed were over when they failed: nobody waits for what they would have taken."""
    over = carried(copies, cuts, losses)
    ordered = sorted(copies)
    for number, (_, (source, target), tokens) in enumerate(ordered):
        end_s, landed, asked_s = over[number]
        before = [
            over[earlier][0]
            for earlier, (_, (sender, receiver), _) in enumerate(ordered[:number])
            if (sender == source or receiver == target) and not is_refused(over[earlier])
        ]
        if landed:
            assert end_s == max([asked_s, *before]) + tokens


def is_refused(over: tuple[float, bool, float]) -> bool:
    """Its wire was cut when it was asked for: it took no turn."""
    end_s, landed, asked_s = over
    return not landed and end_s == asked_s + REFUSED_S


@pytest.mark.parametrize("is_lost", [False, True], ids=["cut", "host lost"])
def test_what_waits_behind_a_copy_that_fails_goes_at_once(is_lost: bool) -> None:
    """Ten seconds to b, and ten more to c behind them; the first fails after two and a half."""
    cuts: list[Asked] = [] if is_lost else [(2, (HostId("a"), HostId("b")), 1)]
    losses = [(2, "b")] if is_lost else []
    first, second = (HostId("a"), HostId("b")), (HostId("a"), HostId("c"))
    assert carried([(0, first, 10), (1, second, 10)], cuts, losses) == {0: (2.5, False, 0.0), 1: (12.5, True, 1.0)}
