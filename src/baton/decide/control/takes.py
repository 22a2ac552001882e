"""Takes what a pool has of a request to where it will go on, in runs, while the rest is still computed and put.

What was taken lies in the target's arena under its names, held by nobody, as what is sent ahead directly does: whoever
goes on there finds it, and asks for what is behind it only. So after the last layer the last run is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.copies import LandingWanted
from baton.core.types import BlockHash, HostId, Request
from baton.decide.control.crossings import Crossings
from baton.decide.control.handoffs import Move
from baton.decide.kv.tier import Tier

RUN_TOKENS = 128
"""Of a request that is not put ahead, fewer are not worth a write and a read. See `WhileComputing.shortest_tokens`."""
RUNS_MAX = 8
"""Most writes of one put that is short of filling what may be under way: each is taken while the next is written."""


@dataclass(slots=True, kw_only=True)
class Flow:
    """How far the blocks of one request have got: into the pool, and on to the target."""

    request: Request
    attempt: int
    target: HostId
    tier: Tier
    names: tuple[BlockHash, ...]
    """Of the blocks that are to get there, from the first one on."""
    run_blocks: int = 1
    """Fewer are not worth a read."""
    pooled_blocks: int
    """Leading ones that the target needs not or the pool has, as far as was looked."""
    taken_blocks: int
    """Leading ones that the target has, or has asked for."""
    is_over: bool = False
    """No more is taken ahead: the target has nothing to spare, the pool has not brought all, or the rest is taken."""


def run_blocks(blocks: int, least_blocks: int) -> int:
    """Cut a put of so many blocks into runs: few, so that they cost little, and the last of them is soon there."""
    return max(1, least_blocks, -(-blocks // RUNS_MAX))


def follow(flow: Flow, crossings: Crossings) -> None:
    """Read what has landed in the pool since the last time, if it is worth that. One read at a time.

    What lands during a read goes with the next one: so a pool that is behind is asked for long runs, and seldom.
    """
    request, target, tier = flow.request, flow.target, flow.tier
    pool = crossings.pools.get(target)
    if flow.is_over or pool is None or pool.tiers is None or (request.id, target) in crossings.handoffs.reads_ahead:
        return
    while flow.pooled_blocks < len(flow.names) and tier.has(flow.names[flow.pooled_blocks]):
        flow.pooled_blocks += 1
    if flow.pooled_blocks - flow.taken_blocks < flow.run_blocks:
        return
    reached = pool.tiers.reach(flow.names[: flow.pooled_blocks])
    blocks = reached[-1].blocks if reached else 0
    if blocks - flow.taken_blocks < flow.run_blocks:
        return  # the store has enough to do for now, or is left alone
    flow.taken_blocks = blocks
    _read(flow, flow.names[:blocks], crossings)


def _read(flow: Flow, names: tuple[BlockHash, ...], crossings: Crossings) -> None:
    """Read these, as far as the target lacks them. `Desk.read_ahead` is called once for it, however it ends."""
    target = flow.target
    move = Move(
        number=crossings.handoffs.next_number(),
        request=flow.request,
        source=target,
        target=target,
        tokens=len(names) * crossings.pools[target].block_tokens,
        names=names,
    )
    crossings.handoffs.begin(move)
    crossings.desk.tell_pool(target, LandingWanted(flow.request, flow.attempt, None, len(names), names))
