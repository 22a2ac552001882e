"""Measures what every copy between hosts and every write and read of a tier takes, for those that choose a way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial

from baton.core.copies import CopyBlocks
from baton.core.keeping import LoadBlocks, StoreBlocks
from baton.core.ports import CostModel, handoff_between_s
from baton.core.types import HostId, WorkerView
from baton.decide.control.roads import Roads, tier_road
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.tier import Tier, tier_named


@dataclass(slots=True, kw_only=True)
class Survey:
    """Told when bytes begin to move, and when they have. Bounded as its roads are."""

    pools: Mapping[HostId, HostPool]
    cost: CostModel
    now_s: Callable[[], float]
    kinds: dict[HostId, Set[str]] = field(default_factory=dict[HostId, Set[str]])
    """Of the workers that each host has had: its wire is theirs."""
    roads: Roads = field(default_factory=Roads)

    def joined(self, worker: WorkerView) -> None:
        """A worker is on a host."""
        self.kinds[worker.host] = {*self.kinds.get(worker.host, ()), worker.kind}

    def lose_host(self, host: HostId) -> None:
        """Forget a host that is gone: it may come back as another one."""
        self.kinds.pop(host, None)
        self.roads.lose_host(host)

    def wire_s(self, source: HostId, target: HostId, tokens: int) -> float:
        """Predict how long so many tokens take from host to host, with nothing else under way."""
        kinds = {*self.kinds.get(source, ()), *self.kinds.get(target, ())}
        return handoff_between_s(self.cost, kinds, tokens=tokens, same_host=False)

    def begun(self, command: CopyBlocks | StoreBlocks | LoadBlocks) -> None:
        """Bytes are about to go between two hosts, or between a host and a tier."""
        now_s = self.now_s()
        if isinstance(command, CopyBlocks):
            road = (command.source, command.target)
            self.roads.begin(_key(command), road, command.whole_tokens, partial(self.wire_s, *road), now_s)
            return
        pool = self.pools[command.host]
        name = command.tier if isinstance(command, StoreBlocks) else command.tiers[0]
        tier = None if pool.tiers is None else tier_named(pool.tiers.tiers, name)
        if tier is not None:
            here, below = command.host, tier_road(name)
            road = (here, below) if isinstance(command, StoreBlocks) else (below, here)
            tokens = len(command.hashes) * pool.block_tokens
            self.roads.begin(_key(command), road, tokens, tier_s(tier, pool.block_tokens), now_s)

    def ended(self, command: CopyBlocks | StoreBlocks | LoadBlocks, *, landed: bool) -> None:
        """They are there, or did not get there."""
        self.roads.end(_key(command), landed=landed, now_s=self.now_s())


def tier_s(tier: Tier, block_tokens: int) -> Callable[[int], float]:
    """Predict how long so many tokens take to a tier, or from it."""
    return lambda tokens: tier.rules.move_s(-(-tokens // block_tokens))


def _key(command: CopyBlocks | StoreBlocks | LoadBlocks) -> tuple[str, str, int]:
    where = command.target if isinstance(command, CopyBlocks) else command.host
    return (type(command).__name__, where, command.number)
