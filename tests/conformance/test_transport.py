"""The contract of every Transport: all bytes in order, or an error and no write after it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import msgspec
import pytest

from baton.core.errors import TransferError
from baton.move.transport.piecewise_pull import PiecewisePull
from baton.move.transport.port import Extent
from tests.transfers.kits import TRANSPORTS, Kit, Side, assert_quiet, kit_of, offered, random_extents
from tests.transfers.wires import Gate

SIZE_BYTES = 1 << 20


@pytest.fixture(
    params=[
        # the copies in portions are those of "memory staged", the wires those of "tcp" and "nixl"
        pytest.param(name, marks=pytest.mark.deep) if name in ("tcp staged", "nixl staged") else name
        for name in TRANSPORTS
    ]
)
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    with kit_of(request.param) as made:
        yield made


@pytest.mark.parametrize("checksum", [False, True])
def test_bytes_arrive_in_order_however_both_sides_are_cut(kit: Kit, checksum: bool) -> None:
    """Compared with an oracle that joins the source's extents and cuts them again; no other byte changes."""
    rng = random.Random(5)
    source, target = kit.side(), kit.side()
    content = source.fill(1)
    for _ in range(25):
        total_bytes = rng.choice([1, 2, 4096, rng.randrange(1, SIZE_BYTES), SIZE_BYTES])
        given = random_extents(rng, SIZE_BYTES, total_bytes=total_bytes, region=source.region)
        into = random_extents(rng, SIZE_BYTES, total_bytes=total_bytes, region=target.region)
        expected = bytearray(target.fill(rng.randrange(1000)))
        moved = b"".join(content[e.offset_bytes : e.offset_bytes + e.size_bytes] for e in given)
        for extent in into:
            expected[extent.offset_bytes : extent.offset_bytes + extent.size_bytes] = moved[: extent.size_bytes]
            moved = moved[extent.size_bytes :]
        ticket = source.transport.offer(given, lease_s=600.0, checksum=checksum)
        assert target.transport.pull(ticket, into).wait(60) == total_bytes
        assert target.content() == bytes(expected)
        source.transport.withdraw(ticket)
    assert source.content() == content


def test_thousands_of_little_runs(kit: Kit) -> None:
    """KV that is cut layer by layer and shuffled on both sides: every run arrives in its own place."""
    source, target = kit.side(), kit.side()
    content, runs = source.fill(1), SIZE_BYTES // 96
    orders = [random.Random(seed).sample(range(runs), runs) for seed in (1, 2)]
    given, into = ([Extent(index * 96, 95) for index in order] for order in orders)
    expected = bytearray(target.fill(2))
    for theirs, ours in zip(*orders, strict=True):
        expected[ours * 96 : ours * 96 + 95] = content[theirs * 96 : theirs * 96 + 95]
    ticket = source.transport.offer(given, lease_s=600.0)
    target.transport.pull(ticket, into).wait(60)
    assert target.content() == bytes(expected)


def test_several_regions_on_both_sides(kit: Kit) -> None:
    """A host may register more than its arena."""
    source, target = kit.side(), kit.side()
    more_source, more_target = kit.side(4096), kit.side(4096)
    assert source.transport.register(more_source.arena.memory, descriptor=more_source.arena.fd) == 1
    assert target.transport.register(more_target.arena.memory, descriptor=more_target.arena.fd) == 1
    content, more = source.fill(1), more_source.fill(2)
    ticket = source.transport.offer([Extent(0, 4096, 1), Extent(10, 100, 0)], lease_s=600.0)
    target.transport.pull(ticket, [Extent(500, 100, 0), Extent(0, 4096, 1)]).wait(60)
    moved = more + content[10:110]
    assert bytes(target.arena.memory[500:600]) + more_target.content() == moved
    for side in (source, target):
        side.transport.close()
        side.source.close()


def test_many_pulls_at_once(kit: Kit) -> None:
    """Between one pair, in both directions, interleaved, from several threads: each gets its own bytes."""
    left, right = kit.side(2 * SIZE_BYTES), kit.side(2 * SIZE_BYTES)
    half = random.Random(9).randbytes(SIZE_BYTES)
    for side in (left, right):
        side.arena.memory[:SIZE_BYTES] = half
    step = SIZE_BYTES // 64
    order = random.Random(3).sample(range(64), 64)

    def pull_all(source: Side, target: Side) -> None:
        pulls = []
        for index, place in enumerate(order):
            ticket = source.transport.offer([Extent(index * step, step, source.region)], lease_s=600.0)
            into = [Extent(SIZE_BYTES + place * step, step, target.region)]
            pulls.append(target.transport.pull(ticket, into))
        for pull in pulls:
            assert pull.wait(60) == step

    threads = [threading.Thread(target=pull_all, args=pair) for pair in ((left, right), (right, left))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for side in (left, right):
        for index, place in enumerate(order):
            got = side.arena.memory[SIZE_BYTES + place * step : SIZE_BYTES + (place + 1) * step]
            assert got == half[index * step : (index + 1) * step]


def test_a_ticket_may_be_pulled_more_than_once(kit: Kit) -> None:
    """By two consumers, and again by the same one."""
    source, first, second = kit.side(), kit.side(), kit.side()
    ticket, content = offered(source)
    for target in (first, second, first):
        target.fill(7)
        target.transport.pull(ticket, target.whole()).wait(60)
        assert target.content() == content


def test_bytes_cross_processes(kit: Kit) -> None:
    """From a source in another process."""
    if not kit.crosses:
        pytest.skip(f"{kit.name} stays in one process")
    target = kit.side()
    remote = kit.remote(11, SIZE_BYTES)
    target.transport.pull(remote.ticket, target.whole()).wait(60)
    assert target.content() == random.Random(11).randbytes(SIZE_BYTES)
    remote.say("withdraw")
    with pytest.raises(TransferError, match="withdrawn"):
        target.transport.pull(remote.ticket, target.whole()).wait(60)


def test_a_pull_tells_when_it_is_over(kit: Kit) -> None:
    """Once, whether `then` is called before or after the end, for success and failure."""
    source, target = kit.side(), kit.side()
    ticket, _ = offered(source)
    for each in (ticket, msgspec.structs.replace(ticket, number=ticket.number + 1)):
        told = threading.Semaphore(0)
        pull = target.transport.pull(each, target.whole())
        pull.then(told.release)
        assert told.acquire(timeout=60)
        pull.then(told.release)
        assert told.acquire(timeout=0)
        assert not told.acquire(timeout=0)


def test_a_wait_that_is_too_short_ends_nothing(kit: Kit) -> None:
    if not kit.holds:
        pytest.skip(f"nothing can hold the bytes of {kit.name} under way")
    source, gate = kit.side(), Gate(200_000)
    target = kit.side(gate=gate)
    ticket, content = offered(source)
    pull = target.transport.pull(kit.through(ticket, gate), target.whole())
    gate.wait_until_reached()
    with pytest.raises(TransferError, match="not over"):
        pull.wait(0.0)
    gate.open()
    assert pull.wait(60) == SIZE_BYTES
    assert target.content() == content


def test_a_lease_ends(kit: Kit) -> None:
    """Before the pull, by the source's clock."""
    now = [0.0]
    source, target = kit.side(now_s=lambda: now[0]), kit.side()
    content = source.fill(1)
    ticket = source.transport.offer(source.whole(), lease_s=5.0)
    now[0] = 4.9
    target.transport.pull(ticket, target.whole()).wait(60)
    assert target.content() == content
    now[0] = 5.0
    with pytest.raises(TransferError, match="lease"):
        target.transport.pull(ticket, target.whole()).wait(60)


@pytest.mark.parametrize("how", ["withdraw", "expire"])
def test_an_offer_that_ends_under_the_pull_fails_it(kit: Kit, how: str) -> None:
    """The source may write its memory at once: later bytes are never accepted, and no write follows the error."""
    if not kit.holds:
        pytest.skip(f"nothing can hold the bytes of {kit.name} under way")
    now = [0.0]
    source, gate = kit.side(8 * SIZE_BYTES, now_s=lambda: now[0]), Gate(200_000)
    target = kit.side(8 * SIZE_BYTES, gate=gate)
    source.fill(1)
    ticket = source.transport.offer(source.whole(), lease_s=5.0)
    pull = target.transport.pull(kit.through(ticket, gate), target.whole())
    gate.wait_until_reached()
    if how == "withdraw":
        source.transport.withdraw(ticket)
    now[0] = 5.0
    source.arena.memory[:] = bytes(8 * SIZE_BYTES)
    gate.open()
    with pytest.raises(TransferError, match=r"withdrawn|lease"):
        pull.wait(60)
    assert_quiet(source, target, gate)


def test_a_withdrawal_at_any_moment_leaves_whole_bytes_or_an_error(kit: Kit) -> None:
    """Never bytes that the source has written after it."""
    source, target = kit.side(4 * SIZE_BYTES), kit.side(4 * SIZE_BYTES)
    content = source.fill(1)
    spoilt = bytes(4 * SIZE_BYTES)
    for seed in range(12):
        source.arena.memory[:] = content
        ticket = source.transport.offer(source.whole(), lease_s=600.0)
        pull = target.transport.pull(ticket, target.whole())
        part = Extent(0, 1 + seed * SIZE_BYTES // 16, source.region)  # takes longer each time
        other = source.transport.offer([part], lease_s=600.0)
        if seed % 3 == 2:
            target.transport.pull(other, [Extent(0, part.size_bytes, target.region)]).wait(60)
        source.transport.withdraw(ticket)
        source.arena.memory[:] = spoilt
        try:
            pull.wait(60)
        except TransferError:
            continue
        assert target.content() == content


def test_a_cancelled_pull_writes_nothing_more(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its bytes are under way. Other pulls still work."""
    if not kit.holds:
        pytest.skip(f"nothing can hold the bytes of {kit.name} under way")
    source, gate = kit.side(8 * SIZE_BYTES), Gate(200_000)
    target = kit.side(8 * SIZE_BYTES, gate=gate)
    ticket, content = offered(source)
    held = kit.through(ticket, gate)
    pull = target.transport.pull(held, target.whole())
    gate.wait_until_reached()
    assert isinstance(pull, PiecewisePull)
    fail = pull.fail

    def fail_and_open(message: str) -> None:
        fail(message)
        gate.open()

    if kit.name != "tcp":  # a copy that has begun is waited for
        monkeypatch.setattr(pull, "fail", fail_and_open)
    pull.cancel()
    with pytest.raises(TransferError, match="cancelled"):
        pull.wait(0.0)
    assert_quiet(source, target, gate)
    pull.cancel()
    target.transport.pull(held, target.whole()).wait(60)
    assert target.content() == content


def test_a_cancel_after_the_end_changes_nothing(kit: Kit) -> None:
    source, target = kit.side(), kit.side()
    ticket, _ = offered(source)
    pull = target.transport.pull(ticket, target.whole())
    pull.wait(60)
    pull.cancel()
    assert pull.wait() == SIZE_BYTES


def test_one_pull_that_fails_harms_no_other(kit: Kit) -> None:
    """Between the same pair, over the same connections."""
    source, target = kit.side(), kit.side()
    content = source.fill(1)
    step = SIZE_BYTES // 32
    pulls = []
    for index in range(32):
        ticket = source.transport.offer([Extent(index * step, step, source.region)], lease_s=600.0)
        if index % 2:
            source.transport.withdraw(ticket)
        pulls.append(target.transport.pull(ticket, [Extent(index * step, step, target.region)]))
    for index, pull in enumerate(pulls):
        if index % 2:
            with pytest.raises(TransferError):
                pull.wait(60)
        else:
            pull.wait(60)
            assert target.content()[index * step : (index + 1) * step] == content[index * step : (index + 1) * step]


def test_the_death_of_the_source_is_an_error(kit: Kit) -> None:
    """kill -9 while bytes are under way: an error, and no write after it."""
    if not kit.crosses:
        pytest.skip(f"{kit.name} stays in one process")
    gate = Gate(200_000)
    target, other = kit.side(16 * SIZE_BYTES, gate=gate), kit.side()
    remote = kit.remote(3, 16 * SIZE_BYTES)
    pull = target.transport.pull(kit.through(remote.ticket, gate), target.whole())
    if kit.holds:
        gate.wait_until_reached()
    remote.kill()
    gate.open()
    with pytest.raises(TransferError):
        pull.wait(60)
    assert_quiet(other, target, gate)
    with pytest.raises(TransferError):
        target.transport.pull(remote.ticket, target.whole()).wait(60)


def test_a_source_that_has_restarted_is_not_taken_for_the_old_one(kit: Kit) -> None:
    """Same address, same offer number, other bytes."""
    if not kit.crosses:
        pytest.skip(f"{kit.name} stays in one process")
    target = kit.side()
    first = kit.remote(3, SIZE_BYTES)
    first.kill()
    second = kit.remote(4, SIZE_BYTES, listen=first.ticket.address)
    stale = msgspec.structs.replace(first.ticket, address=second.ticket.address)
    before = target.fill(9)
    with pytest.raises(TransferError, match="restarted"):
        target.transport.pull(stale, target.whole()).wait(60)
    assert target.content() == before
    target.transport.pull(second.ticket, target.whole()).wait(60)
    assert target.content() == random.Random(4).randbytes(SIZE_BYTES)


def test_only_who_has_the_ticket_may_pull(kit: Kit) -> None:
    source, target = kit.side(), kit.side()
    ticket, _ = offered(source)
    forged = msgspec.structs.replace(ticket, secret=bytes(len(ticket.secret)))
    before = target.fill(9)
    with pytest.raises(TransferError, match="secret"):
        target.transport.pull(forged, target.whole()).wait(60)
    assert target.content() == before


def test_sizes_must_agree(kit: Kit) -> None:
    """Between the two lists, and between the ticket and what was offered."""
    source, target = kit.side(), kit.side(2 * SIZE_BYTES)
    ticket, _ = offered(source)
    before = target.fill(9)
    for into in ([], [Extent(0, SIZE_BYTES - 1)], [Extent(0, SIZE_BYTES), Extent(SIZE_BYTES, 1)]):
        with pytest.raises(TransferError):
            target.transport.pull(ticket, into)
    for size_bytes in (SIZE_BYTES - 1, SIZE_BYTES + 1):
        other = msgspec.structs.replace(ticket, extents=(Extent(0, size_bytes),))
        with pytest.raises(TransferError, match="offered"):
            target.transport.pull(other, [Extent(0, size_bytes)]).wait(60)
    assert target.content() == before


@pytest.mark.parametrize("extent", [(-1, 10), (0, 0), (0, -5), (SIZE_BYTES - 5, 6), (0, 1, 1), (0, 1, -1)])
def test_extents_stay_inside_of_their_region(kit: Kit, extent: tuple[int, ...]) -> None:
    source, target = kit.side(), kit.side()
    with pytest.raises(TransferError):
        source.transport.offer([Extent(*extent)], lease_s=600.0)
    ticket = source.transport.offer([Extent(0, max(1, extent[1]), source.region)], lease_s=600.0)
    with pytest.raises(TransferError):
        target.transport.pull(ticket, [Extent(*extent)])


def test_targets_must_not_overlap(kit: Kit) -> None:
    """Two writers on one byte have no order."""
    source, target = kit.side(), kit.side()
    ticket = source.transport.offer([Extent(0, 200, source.region)], lease_s=600.0)
    with pytest.raises(TransferError, match="overlap"):
        target.transport.pull(ticket, [Extent(50, 100), Extent(0, 51), Extent(300, 49)])


def test_only_writable_memory_is_registered(kit: Kit) -> None:
    side = kit.side()
    with pytest.raises(TransferError, match="read-only"):
        side.transport.register(memoryview(b"abc"))


def test_a_ticket_of_another_transport_is_refused(kit: Kit) -> None:
    source, target = kit.side(), kit.side()
    ticket, _ = offered(source)
    with pytest.raises(TransferError, match="pigeon"):
        target.transport.pull(msgspec.structs.replace(ticket, transport="pigeon"), target.whole())


def test_closing_ends_pulls_and_leaves_no_thread(kit: Kit) -> None:
    """In the middle of a pull, from either end."""
    if not kit.holds:
        pytest.skip(f"nothing can hold the bytes of {kit.name} under way")
    before = set(threading.enumerate())
    source, gate = kit.side(8 * SIZE_BYTES), Gate(200_000)
    target = kit.side(8 * SIZE_BYTES, gate=gate)
    ticket, _ = offered(source)
    pull = target.transport.pull(kit.through(ticket, gate), target.whole())
    gate.wait_until_reached()
    if kit.name != "tcp":
        gate.open()
    target.transport.close()
    written = target.content()
    with pytest.raises(TransferError, match="closed"):
        pull.wait(0.0)
    source.transport.close()
    gate.open()
    kit.through_ended()
    assert set(threading.enumerate()) <= before
    assert target.content() == written
    with pytest.raises(TransferError):
        target.transport.pull(ticket, [Extent(0, 8 * SIZE_BYTES)])
