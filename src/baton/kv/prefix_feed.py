"""What a host tells an index in another process: numbered news, and all that it holds where news were lost.

The channel may lose, repeat and reorder. A host numbers its news from 1 in every epoch (a new one begins with every
start of its process); whoever listens applies them in that order, and asks for a snapshot where one is missing. So
after a snapshot the index knows what the host knew. Until then it is stale, which costs a recompute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from baton.core.types import BlockHash, HostId
from baton.kv.prefix_index import PrefixIndex

EARLY_MAX = 64
"""News of one host that are kept while an earlier one is missing. What comes beyond is dropped."""
ASK_AFTER = 8
"""So many news after a missing one it is taken for lost, not late; and again after as many more."""


class HostNews(Struct, frozen=True, tag=True, kw_only=True):
    """What has changed at a host: first `cleared`, then `removed`, then `stored`."""

    host: HostId
    epoch: int
    """Greater with every start of the host's process."""
    number: int
    """1 for the first of an epoch."""
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False
    """It holds nothing any more."""


class HostPulse(Struct, frozen=True, tag=True):
    """The host lives, and its last news had this number. Sent now and then: it makes the loss of the last one known."""

    host: HostId
    epoch: int
    number: int


class HostSnapshot(Struct, frozen=True, tag=True):
    """All that a host holds after its news of this number."""

    host: HostId
    epoch: int
    number: int
    hashes: tuple[BlockHash, ...]


class SnapshotWanted(Struct, frozen=True, tag=True):
    """The index has missed something: the host shall send a HostSnapshot. Asking twice is harmless."""

    host: HostId


@dataclass(slots=True, kw_only=True)
class NewsSource:
    """The host's side: it numbers what happens."""

    host: HostId
    epoch: int
    number: int = 0
    """Of the last news."""

    def news(
        self, *, stored: Iterable[BlockHash] = (), removed: Iterable[BlockHash] = (), cleared: bool = False
    ) -> HostNews:
        """Make news of a change."""
        self.number += 1
        return HostNews(
            host=self.host,
            epoch=self.epoch,
            number=self.number,
            stored=tuple(stored),
            removed=tuple(removed),
            cleared=cleared,
        )

    def pulse(self) -> HostPulse:
        return HostPulse(self.host, self.epoch, self.number)

    def snapshot(self, held: Iterable[BlockHash]) -> HostSnapshot:
        """Answer SnapshotWanted with what is held now."""
        return HostSnapshot(self.host, self.epoch, self.number, tuple(held))


@dataclass(slots=True)
class _Listening:
    epoch: int
    number: int = 0
    """Of the last news that was applied."""
    early: dict[int, HostNews] = field(default_factory=dict[int, HostNews])
    """News behind a missing one, by number."""
    unanswered: int = 0
    """News since the last time that a snapshot was asked for, or since the gap."""


@dataclass(slots=True)
class PrefixFeed:
    """The index's side: it applies news in order and notices what is missing."""

    index: PrefixIndex
    _hosts: dict[HostId, _Listening] = field(default_factory=dict[HostId, _Listening])

    def handle(self, event: HostNews | HostPulse | HostSnapshot) -> list[SnapshotWanted]:
        """Take in what has arrived. Returns what to ask the host for. Late and repeated events change nothing."""
        host = self._hosts.get(event.host)
        if host is None or event.epoch > host.epoch:
            self.index.forget(event.host)
            host = self._hosts[event.host] = _Listening(event.epoch)
        elif event.epoch < host.epoch:
            return []
        match event:
            case HostNews():
                return self._hear(host, event)
            case HostPulse(number=number):
                return [SnapshotWanted(event.host)] if number > host.number else []
            case HostSnapshot():
                self._reset(host, event)
                return []

    def lose(self, host: HostId) -> None:
        """Forget a host that is gone, with all that it held."""
        self._hosts.pop(host, None)
        self.index.forget(host)

    def _hear(self, host: _Listening, news: HostNews) -> list[SnapshotWanted]:
        if news.number <= host.number or news.number in host.early:
            return []
        if news.number > host.number + 1:
            if len(host.early) < EARLY_MAX:
                host.early[news.number] = news
            host.unanswered += 1
            if host.unanswered % ASK_AFTER == 0:
                return [SnapshotWanted(news.host)]
            return []
        self._apply(host, news)
        self._catch_up(host)
        return []

    def _reset(self, host: _Listening, snapshot: HostSnapshot) -> None:
        if snapshot.number < host.number:
            return  # older than what is known
        self.index.forget(snapshot.host)
        self.index.store(snapshot.host, snapshot.hashes)
        host.number = snapshot.number
        self._catch_up(host)

    def _catch_up(self, host: _Listening) -> None:
        """Apply what has waited for what has just been applied, and drop what that has overtaken."""
        while (news := host.early.pop(host.number + 1, None)) is not None:
            self._apply(host, news)
        host.early = {number: news for number, news in host.early.items() if number > host.number}
        host.unanswered = len(host.early)

    def _apply(self, host: _Listening, news: HostNews) -> None:
        if news.cleared:
            self.index.forget(news.host)
        self.index.remove(news.host, news.removed)
        self.index.store(news.host, news.stored)
        host.number = news.number
