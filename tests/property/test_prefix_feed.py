"""After any loss, repetition and reordering of news, a snapshot makes the index equal to the hosts' truth."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.types import BlockHash, HostId
from baton.kv.prefix_feed import (
    EARLY_MAX,
    HostNews,
    HostPulse,
    HostSnapshot,
    NewsSource,
    PrefixFeed,
    SnapshotWanted,
)
from baton.kv.prefix_index import PrefixIndex

HOSTS = [HostId(name) for name in ("a", "b", "c")]
NAMES = [BlockHash(f"{stream}/{depth}".encode()) for stream in range(2) for depth in range(4)]
hosts = st.sampled_from(HOSTS)
blocks = st.sets(st.sampled_from(NAMES), max_size=4)


def naive_hits(truth: dict[HostId, set[BlockHash]], prompt: list[BlockHash]) -> dict[HostId, int]:
    """Ask each host for itself, block after block."""
    hits: dict[HostId, int] = {}
    for host, held in truth.items():
        count = next((depth for depth, name in enumerate(prompt) if name not in held), len(prompt))
        if count:
            hits[host] = count
    return hits


class IndexAgainstSets(RuleBasedStateMachine):
    """The index alone: its bits say what plain sets say, with more hosts than one machine word has bits."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.truth: dict[HostId, set[BlockHash]] = {}

    @rule(number=st.integers(0, 80), names=blocks)
    def store(self, number: int, names: set[BlockHash]) -> None:
        host = HostId(f"host-{number}")
        self.index.store(host, sorted(names))
        self.truth.setdefault(host, set()).update(names)

    @rule(number=st.integers(0, 80), names=blocks)
    def remove(self, number: int, names: set[BlockHash]) -> None:
        host = HostId(f"host-{number}")
        self.index.remove(host, sorted(names))
        self.truth.get(host, set()).difference_update(names)

    @rule(number=st.integers(0, 80))
    def forget(self, number: int) -> None:
        self.index.forget(HostId(f"host-{number}"))
        self.truth.pop(HostId(f"host-{number}"), None)

    @rule(prompt=st.lists(st.sampled_from(NAMES), max_size=5))
    def look_up(self, prompt: list[BlockHash]) -> None:
        assert self.index.hit_blocks(prompt) == naive_hits(self.truth, prompt)

    @invariant()
    def holds_no_more_than_the_hosts(self) -> None:
        """INV-9: nothing stays of a block or a host that is gone."""
        assert len(self.index) == len(set().union(*self.truth.values()))
        assert set(self.index._bits) == {host for host, held in self.truth.items() if held}


class FeedOverABadChannel(RuleBasedStateMachine):
    """Three hosts; what they say is lost, repeated and reordered. At the end everybody is asked once more."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = PrefixFeed(PrefixIndex())
        self.truth: dict[HostId, set[BlockHash]] = {host: set() for host in HOSTS}
        self.sources = {host: NewsSource(host=host, epoch=1) for host in HOSTS}
        self.wire: list[HostNews | HostPulse | HostSnapshot] = []

    @rule(host=hosts, stored=blocks, removed=blocks, cleared=st.booleans())
    def change(self, host: HostId, stored: set[BlockHash], removed: set[BlockHash], cleared: bool) -> None:
        held = self.truth[host]
        if cleared:
            held.clear()
        held -= removed
        held |= stored
        self.wire.append(self.sources[host].news(stored=sorted(stored), removed=sorted(removed), cleared=cleared))

    @rule(host=hosts)
    def restart(self, host: HostId) -> None:
        """The process dies with what it held, and begins to count anew."""
        self.truth[host].clear()
        self.sources[host] = NewsSource(host=host, epoch=self.sources[host].epoch + 1)

    @rule(host=hosts)
    def pulse(self, host: HostId) -> None:
        self.wire.append(self.sources[host].pulse())

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives", "arrives twice", "lost"]))
    def travel(self, data: st.DataObject, fate: str) -> None:
        event = self.wire[data.draw(st.integers(0, min(3, len(self.wire) - 1)))]
        if fate != "arrives twice":
            self.wire.remove(event)
        if fate != "lost":
            self.deliver(event)

    def deliver(self, event: HostNews | HostPulse | HostSnapshot) -> None:
        for asked in self.feed.handle(event):
            assert isinstance(asked, SnapshotWanted)
            self.wire.append(self.sources[asked.host].snapshot(sorted(self.truth[asked.host])))

    @invariant()
    def keeps_little(self) -> None:
        assert all(len(listening.early) <= EARLY_MAX for listening in self.feed._hosts.values())

    def teardown(self) -> None:
        """One pulse of each host and its answer arrive; what is still on the wire comes late, and changes nothing."""
        late, self.wire = self.wire, []
        for host in HOSTS:
            self.deliver(self.sources[host].pulse())
        for snapshot in self.wire:
            assert self.feed.handle(snapshot) == []
        for event in late:
            self.feed.handle(event)
        for host in HOSTS:
            assert self.feed.index.held_by(host) == self.truth[host]


IndexAgainstSets.TestCase.settings = settings(stateful_step_count=30)
TestIndex = IndexAgainstSets.TestCase
TestFeed = FeedOverABadChannel.TestCase


@given(order=st.permutations(range(6)))
def test_news_in_any_order_need_no_snapshot(order: list[int]) -> None:
    source, feed = NewsSource(host=HOSTS[0], epoch=1), PrefixFeed(PrefixIndex())
    news = [source.news(stored=[name]) for name in NAMES[:5]]
    news.append(source.news(removed=NAMES[:1]))
    for place in order:
        assert feed.handle(news[place]) == []
    assert feed.index.held_by(HOSTS[0]) == set(NAMES[1:5])


def test_a_lost_event_is_asked_for_until_it_is_answered() -> None:
    source, feed = NewsSource(host=HOSTS[0], epoch=1), PrefixFeed(PrefixIndex())
    source.news(stored=NAMES[:1])
    asked = [feed.handle(source.news(stored=[BlockHash(bytes([number]))])) for number in range(200)]
    assert [number for number, wanted in enumerate(asked) if wanted] == list(range(7, 200, 8))
    assert feed.handle(source.snapshot([NAMES[0]])) == []
    assert feed.index.held_by(HOSTS[0]) == {NAMES[0]}
    assert feed.handle(source.news(stored=[NAMES[1]])) == []
    assert feed.index.held_by(HOSTS[0]) == {NAMES[0], NAMES[1]}


def test_the_loss_of_the_last_event_shows_with_the_next_pulse() -> None:
    source, feed = NewsSource(host=HOSTS[0], epoch=1), PrefixFeed(PrefixIndex())
    feed.handle(source.news(stored=NAMES[:2]))
    source.news(removed=NAMES[:1])
    assert feed.handle(source.pulse()) == [SnapshotWanted(HOSTS[0])]


def test_a_host_that_is_gone_is_forgotten() -> None:
    source, feed = NewsSource(host=HOSTS[0], epoch=1), PrefixFeed(PrefixIndex())
    feed.handle(source.news(stored=NAMES[:2]))
    feed.lose(HOSTS[0])
    assert len(feed.index) == 0
