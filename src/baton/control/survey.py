"""Measures what every copy between hosts and every write and read of a tier takes, for those that choose a way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.control.roads import Roads, tier_road
from baton.core.copies import CopyBlocks
from baton.core.keeping import LoadBlocks, StoreBlocks
from baton.core.ports import CostModel
from baton.core.types import HostId
from baton.kv.host_pool import HostPool
from baton.kv.tier import Tier, tier_named


@dataclass(slots=True, kw_only=True)
class Survey:
    """Told when bytes begin to move, and when they have. Bounded as its roads are."""

    pools: Mapping[HostId, HostPool]
    cost: CostModel
    now_s: Callable[[], float]
    roads: Roads = field(default_factory=Roads)

    def begun(self, command: CopyBlocks | StoreBlocks | LoadBlocks) -> None:
        """Bytes are about to go between two hosts, or between a host and a tier."""
        now_s = self.now_s()
        if isinstance(command, CopyBlocks):
            road = (command.source, command.target)
            self.roads.begin(_key(command), road, command.whole_tokens, wire_s(self.cost), now_s)
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


def wire_s(cost: CostModel) -> Callable[[int], float]:
    """Predict how long so many tokens take from host to host."""
    return lambda tokens: cost.handoff_s(tokens=tokens, same_host=False)


def tier_s(tier: Tier, block_tokens: int) -> Callable[[int], float]:
    """Predict how long so many tokens take to a tier, or from it."""
    return lambda tokens: tier.rules.move_s(-(-tokens // block_tokens))


def _key(command: CopyBlocks | StoreBlocks | LoadBlocks) -> tuple[str, str, int]:
    where = command.target if isinstance(command, CopyBlocks) else command.host
    return (type(command).__name__, where, command.number)
