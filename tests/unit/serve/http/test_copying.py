"""Copies between hosts end exactly once, and not before nobody can touch their blocks any more (INV-3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from baton.core.copies import CopyBlocks
from baton.core.types import BlockId, HostId, RequestId
from baton.decide.kv.layout import KVLayout
from baton.move.transport.port import Ticket
from baton.serve.live.copying import CopyEnd, Copying
from baton.serve.messages.moving import (
    BlocksOffered,
    BlocksWithdrawn,
    CancelPull,
    CopyEvent,
    MoverOrder,
    MoverReady,
    OfferBlocks,
    OfferRefused,
    PullBlocks,
    PullEnded,
    WithdrawBlocks,
)

A, B = HostId("a"), HostId("b")
COPY_S = 10.0
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=16, block_tokens=16, dtype="uint8")


def ready(machine: str = "m", transports: tuple[str, ...] = ("shm", "tcp")) -> MoverReady:
    return MoverReady(pid=1, machine=machine, transports=transports, address="")


def ticket(number: int) -> Ticket:
    return Ticket(transport="tcp", address="", epoch=1, number=number, secret=b"", extents=())


def copy_of(number: int, source: HostId = A, target: HostId = B) -> CopyBlocks:
    blocks = (BlockId(number),)
    return CopyBlocks(RequestId(f"r{number}"), number, source, target, blocks, blocks, 0, 16)


@dataclass(slots=True)
class Alarm:
    at_s: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(slots=True)
class FakeMover:
    """Keeps what it was ordered until the test lets it act. Knows which copies may still touch its arena."""

    host: HostId
    generation: int = 1
    orders: list[MoverOrder] = field(default_factory=list[MoverOrder])
    offering: set[int] = field(default_factory=set[int])
    pulling: set[int] = field(default_factory=set[int])

    def send(self, generation: int, order: MoverOrder) -> None:
        if generation == self.generation:
            self.orders.append(order)

    def act(self, *, refuse: bool = False) -> list[CopyEvent]:
        """Carry out the oldest order."""
        order = self.orders.pop(0)
        match order:
            case OfferBlocks(number=number):
                if refuse:
                    return [OfferRefused(number, "no")]
                self.offering.add(number)
                return [BlocksOffered(number, ticket(number))]
            case PullBlocks(number=number):
                self.pulling.add(number)
                return []
            case WithdrawBlocks(number=number):
                self.offering.discard(number)
                return [BlocksWithdrawn(number)]
            case CancelPull(number=number):
                return self.end(number, landed=False)

    def end(self, number: int, *, landed: bool) -> list[CopyEvent]:
        """A pull is over."""
        if number not in self.pulling:
            return []
        self.pulling.discard(number)
        return [PullEnded(number, landed=landed, moved_bytes=7, error="" if landed else "broken")]

    def die(self) -> None:
        """The next one knows nothing of this one's orders."""
        self.generation += 1
        self.orders.clear()
        self.offering.clear()
        self.pulling.clear()


class World:
    """Two hosts with their movers, a clock, and what has ended."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.alarms: list[Alarm] = []
        self.ends: dict[int, CopyEnd] = {}
        self.movers = {A: FakeMover(A), B: FakeMover(B)}
        self.copying = Copying(copy_s=COPY_S, now_s=lambda: self.now_s, later=self._later, ended=self._ended)
        for host, mover in self.movers.items():
            self.copying.add_host(host, mover, LAYOUT)

    def _later(self, delay_s: float, call: Callable[[], None]) -> Alarm:
        self.alarms.append(Alarm(self.now_s + delay_s, call))
        return self.alarms[-1]

    def _ended(self, copy: CopyBlocks, end: CopyEnd) -> None:
        assert copy.number not in self.ends, "told twice"
        self.ends[copy.number] = end
        for mover in self.movers.values():
            assert copy.number not in mover.pulling, "the target still writes"
            assert end.landed or copy.number not in mover.offering, "the source still reads"

    def up(self, host: HostId, said: MoverReady | None = None) -> None:
        self.copying.mover_ready(host, self.movers[host].generation, said or ready())

    def act(self, host: HostId, *, refuse: bool = False) -> None:
        mover = self.movers[host]
        if mover.orders:
            for news in mover.act(refuse=refuse):
                self.copying.mover_reported(host, mover.generation, news)

    def end(self, host: HostId, number: int, *, landed: bool) -> None:
        mover = self.movers[host]
        for news in mover.end(number, landed=landed):
            self.copying.mover_reported(host, mover.generation, news)

    def lose_mover(self, host: HostId) -> None:
        generation = self.movers[host].generation
        self.movers[host].die()
        self.copying.mover_lost(host, generation, "it died")

    def wait(self, for_s: float) -> None:
        self.now_s += for_s
        for alarm in [alarm for alarm in self.alarms if alarm.at_s <= self.now_s]:
            self.alarms.remove(alarm)
            if not alarm.cancelled:
                alarm.call()

    def settle(self) -> None:
        """Let every order that is on its way be carried out."""
        while any(mover.orders for mover in self.movers.values()):
            for host in self.movers:
                self.act(host)


def both_up(*said: MoverReady) -> World:
    world = World()
    for host, one in zip((A, B), said or (ready(), ready()), strict=True):
        world.up(host, one)
    return world


def test_a_copy_lands_and_its_offer_is_withdrawn() -> None:
    world = both_up()
    world.copying.begin(copy_of(1))
    world.settle()
    world.end(B, 1, landed=True)
    assert world.ends[1].landed
    assert world.ends[1].moved_bytes == 7
    world.settle()
    assert not world.movers[A].offering


def test_a_copy_waits_for_movers_that_are_being_started() -> None:
    world = World()
    world.copying.begin(copy_of(1))
    world.up(A)
    world.settle()
    assert not world.movers[A].offering
    world.up(B)
    world.settle()
    assert world.movers[B].pulling == {1}


def test_a_host_without_a_mover_ends_the_copy_but_not_at_once() -> None:
    """The carrier is in the middle of its own work when it begins a copy."""
    world = both_up()
    world.copying.begin(copy_of(1, target=HostId("nowhere")))
    assert not world.ends
    world.wait(0.0)
    assert "no mover" in world.ends[1].error


def test_shared_memory_is_for_one_machine_and_given_up_where_it_fails() -> None:
    apart = both_up(ready("m"), ready("n"))
    apart.copying.begin(copy_of(1))
    assert [order.transport for order in apart.movers[A].orders if isinstance(order, OfferBlocks)] == ["tcp"]
    near = both_up()
    near.copying.begin(copy_of(1))
    assert [order.transport for order in near.movers[A].orders if isinstance(order, OfferBlocks)] == ["shm"]
    near.settle()
    near.end(B, 1, landed=False)
    near.settle()
    near.copying.begin(copy_of(2))
    assert [order.transport for order in near.movers[A].orders if isinstance(order, OfferBlocks)] == ["tcp"]


def test_movers_without_a_common_transport_end_the_copy() -> None:
    world = both_up(ready(transports=("shm",)), ready("n"))
    world.copying.begin(copy_of(1))
    assert not world.ends
    world.wait(0.0)
    assert "no transport" in world.ends[1].error


def test_a_copy_that_takes_too_long_is_ended_on_both_sides_first() -> None:
    world = both_up()
    world.copying.begin(copy_of(1))
    world.settle()
    world.wait(COPY_S)
    assert not world.ends, "a mover may still touch the blocks"
    world.act(B)
    assert not world.ends
    world.act(A)
    assert "hosts.copy_s" in world.ends[1].error


def test_orders_to_a_dead_mover_do_not_reach_the_next() -> None:
    world = both_up()
    world.copying.begin(copy_of(1))
    world.lose_mover(A)
    assert not world.ends[1].landed
    world.up(A)
    world.settle()
    assert not world.movers[A].offering


STEPS = st.sampled_from(
    ["begin", "act a", "act b", "refuse a", "land b", "break b", "lose a", "lose b", "up a", "up b", "wait", "gone b"]
)


@given(steps=st.lists(STEPS, max_size=60))
def test_every_copy_ends_once_and_when_nobody_touches_its_blocks(steps: list[str]) -> None:
    """Whatever movers do, and hosts that go. `World._ended` looks at each end."""
    world, begun, gone = both_up(), 0, False
    for step in steps:
        verb, _, who = step.partition(" ")
        host = A if who == "a" else B
        match verb:
            case "begin":
                begun += 1
                world.copying.begin(copy_of(begun))
            case "act":
                world.act(host)
            case "refuse":
                world.act(host, refuse=True)
            case "land" | "break":
                for number in sorted(world.movers[host].pulling)[:1]:
                    world.end(host, number, landed=verb == "land")
            case "lose":
                world.lose_mover(host)
            case "up":
                world.up(host)
            case "wait":
                world.wait(COPY_S / 2)
            case "gone" if not gone:
                gone = True
                world.movers[B].die()
                world.copying.lose_host(B, "it is gone")
            case _:
                pass
    for _ in range(3):
        world.wait(COPY_S)
        world.settle()
    assert sorted(world.ends) == list(range(1, begun + 1))
    assert not world.copying.has_copy_of(A)
    assert not world.movers[A].offering
    assert not world.movers[B].pulling
