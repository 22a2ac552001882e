"""Estimates of the time to copy KV between two hosts, or a host and a tier, corrected by measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial

from baton.core.copies import CopyBlocks, CopyEnded
from baton.core.handoff_paths import LinkView
from baton.core.ports import CostModel, handoff_between_s
from baton.core.tier_messages import BlocksKept, LoadBlocks, LoadEnded, StoreBlocks, StoreEvent
from baton.core.types import HostId, WorkerView
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.tier import Tier, tier_named

Link = tuple[str, str]
"""From and to: names of hosts, or of a tier, which begins with `tier:`."""
_TIER = "tier:"
_NEWEST_RATIO = 0.25
"""Weight of the newest measurement."""
FORGET_S = 30.0
"""Time in which a measurement's weight decays to 1/e. So a link that was slow once is tried again, even without a
transfer that shows its recovery."""


def tier_link(tier: str) -> str:
    """Return the name of a tier as an end of a link. It has a colon, which no host name has."""
    return f"{_TIER}{tier}"


def tier_s(tier: Tier, block_tokens: int) -> Callable[[int], float]:
    """Return a function from a number of tokens to the predicted seconds to write or read them."""
    return lambda tokens: tier.rules.move_s(-(-tokens // block_tokens))


@dataclass(slots=True)
class _Measured:
    ratio: float = 1.0
    """Measured time divided by predicted time."""
    count: int = 0
    last_s: float = 0.0
    """Time of the last measurement."""
    failed_s: float | None = None
    """Time of the last failure, if nothing has succeeded since."""
    tokens: int = 0
    """Tokens under way."""

    def ratio_at(self, now_s: float) -> float:
        """Return the correction factor of a prediction, after decay."""
        return 1.0 + (self.ratio - 1.0) * math.exp(-(now_s - self.last_s) / FORGET_S)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    link: Link
    tokens: int
    predicted_s: float
    began_s: float


@dataclass(slots=True, kw_only=True)
class LinkEstimates:
    """Measured links between hosts and to tiers, and the copies, writes and reads under way on them."""

    pools: Mapping[HostId, HostPool]
    cost: CostModel
    kinds: dict[HostId, Set[str]] = field(default_factory=dict[HostId, Set[str]])
    """Kinds of the workers that each host has had. They share its network link."""
    _measured: dict[Link, _Measured] = field(default_factory=dict[Link, _Measured])
    _under_way: dict[Hashable, _UnderWay] = field(default_factory=dict[Hashable, _UnderWay])

    def joined(self, worker: WorkerView) -> None:
        """Note the kind of a worker on its host."""
        self.kinds[worker.host] = {*self.kinds.get(worker.host, ()), worker.kind}

    def lose_host(self, host: HostId) -> None:
        """Forget a lost host's links: another host may join under its name."""
        self.kinds.pop(host, None)
        self._measured = {link: known for link, known in self._measured.items() if host not in link}
        self._under_way = {key: begun for key, begun in self._under_way.items() if host not in begun.link}

    def wire_s(self, source: HostId, target: HostId, tokens: int) -> float:
        """Predict the seconds to copy tokens between two hosts over an idle link."""
        kinds = {*self.kinds.get(source, ()), *self.kinds.get(target, ())}
        return handoff_between_s(self.cost, kinds, tokens=tokens, same_host=False)

    def copy_begins(self, copy: CopyBlocks, now_s: float) -> None:
        """Note a copy between two hosts."""
        link = (copy.source, copy.target)
        self.begin(("copy", copy.number), link, copy.whole_tokens, partial(self.wire_s, *link), now_s)

    def copy_ends(self, copy: CopyEnded, now_s: float) -> None:
        """Note the end of a copy between two hosts."""
        self.end(("copy", copy.number), landed=copy.landed, now_s=now_s)

    def tier_work_begins(self, command: StoreBlocks | LoadBlocks, now_s: float) -> None:
        """Note a write or a read of a tier. A read of several tiers counts for the tier of its first block."""
        pool, is_write = self.pools[command.host], isinstance(command, StoreBlocks)
        name = command.tier if isinstance(command, StoreBlocks) else command.tiers[0]
        tier = None if pool.tiers is None else tier_named(pool.tiers.tiers, name)
        if tier is not None:
            here, below = command.host, tier_link(name)
            tokens = len(command.hashes) * pool.block_tokens
            key = ("write" if is_write else "read", command.host, command.number)
            self.begin(
                key, (here, below) if is_write else (below, here), tokens, tier_s(tier, pool.block_tokens), now_s
            )

    def tier_work_ends(self, host: HostId, event: StoreEvent, now_s: float) -> str | None:
        """Record the end of a write or a read of a tier. Return the name of the tier if it was a write."""
        if isinstance(event, LoadEnded):
            self.end(("read", host, event.number), landed=any(event.whole), now_s=now_s)
        elif isinstance(event, BlocksKept):
            link = self.end(("write", host, event.number), landed=any(event.kept), now_s=now_s)
            return link[1].removeprefix(_TIER) if link is not None else None
        return None

    def begin(self, key: Hashable, link: Link, tokens: int, alone_s: Callable[[int], float], now_s: float) -> None:
        """Record the start of a copy, write or read under a unique `key`. `alone_s`: as in `view`."""
        known = self._measured.setdefault(link, _Measured())
        self._under_way[key] = _UnderWay(link, tokens, alone_s(known.tokens + tokens), now_s)
        known.tokens += tokens

    def end(self, key: Hashable, *, landed: bool, now_s: float) -> Link | None:
        """Record the end and its measured time. Return the link, or None for an unknown key or a forgotten link."""
        begun = self._under_way.pop(key, None)
        if begun is None:
            return None
        known = self._measured[begun.link]
        known.tokens -= begun.tokens
        known.failed_s = None if landed else now_s
        if landed and begun.predicted_s > 0.0:
            ratio = (now_s - begun.began_s) / begun.predicted_s
            before = known.ratio_at(now_s)
            known.ratio = before + (ratio - before) * (_NEWEST_RATIO if known.count else 1.0)
            known.count += 1
            known.last_s = now_s
        return begun.link

    def view(self, link: Link, tokens: int, alone_s: Callable[[int], float], now_s: float) -> LinkView:
        """Predict the time to copy tokens from now on.

        `alone_s` predicts the time on an idle link; tokens under way and measurements correct it.
        """
        known = self._measured.get(link) or _Measured()
        return LinkView(
            expected_s=alone_s(known.tokens + tokens) * known.ratio_at(now_s) if tokens else 0.0,
            is_measured=known.count > 0,
            failed_ago_s=math.inf if known.failed_s is None else now_s - known.failed_s,
        )
