"""The router of cells: homes by hash, bounds of load, health, draining and further attempts."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.decide.control.cell_router import (
    AttemptFailed,
    Cell,
    CellCommand,
    CellDrained,
    CellEvent,
    CellRouter,
    CellRules,
    CellSaid,
    DropConnections,
    RefuseRequest,
    RequestCame,
    RequestEnded,
    SendToCell,
)

UNBOUND = CellRules(load_ratio=100.0, free_requests=1 << 20)
KEYS = [number * 0x9E3779B97F4A7C15 & (1 << 64) - 1 for number in range(1000)]


def ready(names: str = "abcd", rules: CellRules = UNBOUND, **weights: float) -> CellRouter:
    router = CellRouter([Cell(name, weights.get(name, 1.0)) for name in names], rules)
    for name in names:
        assert router.handle(CellSaid(name, "ready")) == []
    return router


def home(router: CellRouter, key: int) -> str:
    """Return the cell of a request that ends at once."""
    (sent,) = router.handle(RequestCame(0, key))
    router.handle(RequestEnded(0))
    assert isinstance(sent, SendToCell)
    return sent.cell


def homes(router: CellRouter) -> list[str]:
    return [home(router, key) for key in KEYS]


def test_each_cell_is_home_of_its_weights_share() -> None:
    counts = Counter(homes(ready(d=2.0)))
    shares = [counts[name] / len(KEYS) for name in "abcd"]
    assert shares == pytest.approx([0.2, 0.2, 0.2, 0.4], abs=0.05)


@pytest.mark.parametrize("change", ["lost", "unready", "drained"])
def test_only_the_keys_of_a_cell_that_leaves_get_another_home_and_they_come_back(change: str) -> None:
    router = ready()
    before = homes(router)
    event = CellDrained("b", True) if change == "drained" else CellSaid("b", "lost" if change == "lost" else "unready")
    assert router.handle(event) == ([DropConnections("b")] if change == "lost" else [])
    after = homes(router)
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "b")
    assert set(after) == set("acd")
    router.handle(CellDrained("b", False) if change == "drained" else CellSaid("b", "ready"))
    assert homes(router) == before


def test_a_cell_that_joins_takes_keys_only_for_itself() -> None:
    before, after = homes(ready("abcd")), homes(ready("abcde"))
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert set(moved) == {"e"}
    assert len(moved) / len(KEYS) == pytest.approx(0.2, abs=0.05)


def test_a_hot_prefix_spills_in_a_fixed_order_once_its_home_has_its_bound() -> None:
    router = ready(rules=CellRules(load_ratio=1.5, free_requests=0))
    placed = [router.handle(RequestCame(number, 7))[0] for number in range(40)]
    counts = Counter(sent.cell for sent in placed if isinstance(sent, SendToCell))
    assert list(counts) == sorted("abcd", key=lambda name: router.cells[name].distance(7))[: len(counts)]
    assert (counts.total(), max(counts.values())) == (40, 15), "1.5 x 40 / 4"
    assert counts[home(ready(), 7)] == 15


def test_few_requests_stay_with_their_prefix() -> None:
    router = ready(rules=CellRules(load_ratio=1.0, free_requests=3))
    cells = [router.handle(RequestCame(number, 7)) for number in range(3)]
    assert len({str(sent[0].cell) for sent in cells if isinstance(sent[0], SendToCell)}) == 1


def test_a_broken_attempt_goes_to_the_next_cell_and_ends_after_the_last_attempt() -> None:
    router = ready(rules=CellRules(attempts_max=3))
    first = router.handle(RequestCame(1, 5))
    second = router.handle(AttemptFailed(1, "broken"))
    third = router.handle(AttemptFailed(1, "broken"))
    cells = [sent.cell for (sent,) in (first, second, third) if isinstance(sent, SendToCell)]
    assert len(set(cells)) == 3
    assert router.handle(AttemptFailed(1, "broken")) == [RefuseRequest(1, "3 cells did not serve the request")]
    assert router.open_requests == 0 == sum(cell.running for cell in router.cells.values())
    assert router.handle(AttemptFailed(1, "broken")) == router.handle(RequestEnded(1)) == []


def test_stored_state_is_looked_for_in_every_cell() -> None:
    router = ready("abcdefgh", CellRules(attempts_max=2))
    sent = router.handle(RequestCame(1, 5))
    cells = [sent[0].cell] if isinstance(sent[0], SendToCell) else []
    while isinstance((sent := router.handle(AttemptFailed(1, "unknown")))[0], SendToCell):
        cells.append(sent[0].cell)
    assert sorted(cells) == list("abcdefgh")


def test_a_fleet_that_refuses_everything_gets_few_further_attempts() -> None:
    router = ready(rules=CellRules(refusal_ratio=0.1, attempts_max=2))
    further = 0
    for number in range(1000):
        router.handle(RequestCame(number, number))
        further += isinstance(router.handle(AttemptFailed(number, "refused"))[0], SendToCell)
        router.handle(RequestEnded(number))
    assert further == pytest.approx(100 + 100, abs=2)


def test_without_a_cell_a_request_is_refused_with_their_states() -> None:
    router = ready("abc")
    router.handle(CellSaid("a", "lost"))
    router.handle(CellSaid("b", "unready"))
    router.handle(CellDrained("c", True))
    assert router.handle(RequestCame(1, 1)) == [
        RefuseRequest(1, "no cell takes requests: 1 do not answer, 1 drain, of 3")
    ]


def test_connections_are_dropped_once_per_loss() -> None:
    router = ready("ab")
    assert [router.handle(CellSaid("a", "lost")) for _ in range(2)] == [[DropConnections("a")], []]


EVENTS = st.one_of(
    st.builds(RequestCame, st.integers(0, 30), st.integers(0, 2**64 - 1)),
    st.builds(AttemptFailed, st.integers(0, 30), st.sampled_from(["broken", "refused", "unknown"])),
    st.builds(RequestEnded, st.integers(0, 30)),
    st.builds(CellSaid, st.sampled_from("abcd"), st.sampled_from(["ready", "unready", "lost"])),
    st.builds(CellDrained, st.sampled_from("abcd"), st.booleans()),
)


@given(st.lists(EVENTS, max_size=60))
def test_loads_are_conserved_and_bounded_and_a_replay_decides_the_same(events: list[CellEvent]) -> None:
    rules = CellRules(load_ratio=1.2, free_requests=1)
    router, again = (CellRouter([Cell(name) for name in "abcd"], rules) for _ in range(2))
    numbers: set[int] = set()
    for event in events:
        if isinstance(event, RequestCame) and event.number in numbers:
            continue  # the driver numbers requests
        commands = router.handle(event)
        for command in commands:
            _note(router, command, numbers)
        if isinstance(event, RequestEnded):
            numbers.discard(event.number)
        assert router.open_requests == len(numbers) == sum(cell.running for cell in router.cells.values())
        copied = msgspec.json.decode(msgspec.json.encode(event), type=CellEvent)
        assert again.handle(copied) == commands


def _note(router: CellRouter, command: CellCommand, numbers: set[int]) -> None:
    match command:
        case SendToCell(number=number, cell=name):
            assert router.cells[name].takes_requests
            numbers.add(number)
        case RefuseRequest(number=number):
            numbers.discard(number)
        case DropConnections(cell=name):
            assert router.cells[name].state == "lost"
