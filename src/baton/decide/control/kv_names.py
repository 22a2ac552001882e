"""Names and counts of a request's KV on a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.core.messages import StartDecode
from baton.core.types import BlockHash, HostId, Request
from baton.decide.control.transfer import Start
from baton.decide.kv.hashing import names_of, prefix_of
from baton.decide.kv.host_pool import HostPool


def tokens_at(pools: Mapping[HostId, HostPool], source: HostId | None, start: Start) -> int:
    """Return the number of the request's leading tokens whose KV the host `source` can provide now."""
    pool = pools.get(source) if source is not None else None
    if pool is None:
        return 0
    request = start.request
    if isinstance(start, StartDecode):
        return pool.table(request.id)[1]
    if request.sampling.prompt_logprobs:
        return 0  # every prompt token has to be computed
    return min(pool.held_tokens(request.block_hashes), request.prompt_tokens - 1)


def reachable_blocks(pool: HostPool, names: Sequence[BlockHash]) -> int:
    """Return how many of the leading blocks a host has in its arena or can read from its tiers."""
    if pool.tiers is None:
        return 0
    reached = pool.tiers.reach(names)
    return reached[-1].blocks if reached else pool.tiers.held_blocks(names)


def prefix_names(pool: HostPool, request: Request) -> tuple[BlockHash, ...]:
    """Return the hashes of a prompt's shareable full blocks, for this host's block size. See `prefix_of`."""
    return prefix_of(request, block_runs=pool.block_runs, block_tokens=pool.block_tokens)


def names_at(giver: HostPool, taker: HostPool, request: Request, tokens: int) -> tuple[BlockHash, ...]:
    """Return the known hashes of the full blocks that the request's leading tokens fill at the target (`taker`).

    Hashes of the prompt are known. After the prompt, a hash is known if a sealed block of the source (`giver`) ends at
    the same token.
    """
    blocks, sealed = tokens // taker.block_tokens, giver.names(request.id)
    if giver.block_runs == taker.block_runs:
        return max(sealed[:blocks], names_of(request.block_hashes, taker.block_runs)[:blocks], key=len)
    names = list(names_of(request.block_hashes, taker.block_runs)[:blocks])
    while len(names) < blocks:
        index, rest = divmod((len(names) + 1) * taker.block_runs, giver.block_runs)
        if rest or index > len(sealed):
            break
        names.append(sealed[index - 1])
    return tuple(names)
