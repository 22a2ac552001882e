"""Choose how much of a prompt is taken from the arena and read from the tiers, and how much is computed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, TierHit, WorkerView
from baton.decide.cost.online import cost_of


class Prefix(Struct, frozen=True, gc=False):
    """Leading tokens of a prompt that a worker does not compute, and the resulting times."""

    tokens: int
    load_s: float
    """Time until the tokens are in the arena. 0: they are there already."""
    ttft_s: float
    """Time until the rest of the prompt is computed, including the worker's queue."""


def longest_hit(cluster: ClusterView) -> HostId | None:
    """Return the host with the longest prefix hit; the lowest id on a tie."""
    hits = cluster.prefix_hit_tokens
    return min(hits, key=lambda host: (-hits[host], host)) if hits else None


def best_prefix(
    prompt_tokens: int, held_tokens: int, tier_hits: Sequence[TierHit], cost: CostModel, *, wait_s: float = 0.0
) -> Prefix:
    """Choose the number of tokens to read from tiers that minimizes TTFT; on a tie, the fewest.

    `wait_s`: time of the worker's queue; tiers are read meanwhile. `cost`: for the worker's hardware. Later tokens cost
    more to compute than earlier ones but the same to read. So if reading part of a tier pays, reading all of it pays
    more, and only the ends of `tier_hits` are compared.
    """

    def prefix(tokens: int, load_s: float) -> Prefix:
        rest_s = cost.prefill_s(new_tokens=max(0, prompt_tokens - tokens), cached_tokens=tokens)
        return Prefix(tokens, load_s, max(wait_s, load_s) + rest_s)

    best = prefix(held_tokens, 0.0)
    for hit in tier_hits:
        if hit.tokens > best.tokens:
            best = min(best, prefix(hit.tokens, hit.load_s), key=lambda choice: choice.ttft_s)
    return best


def prefix_on(
    worker: WorkerView, request: Request, cluster: ClusterView, cost: CostModel, *, wait_s: float = 0.0
) -> Prefix:
    """Return `best_prefix` for this worker and its host."""
    held_tokens = cluster.prefix_hit_tokens.get(worker.host, 0)
    return best_prefix(
        request.prompt_tokens, held_tokens, cluster.tier_hits.get(worker.host, ()), cost_of(worker, cost), wait_s=wait_s
    )
