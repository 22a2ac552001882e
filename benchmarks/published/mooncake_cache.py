"""Mooncake's cache curves: how much of all prompts a cache of some size holds, and what one for all nodes gains.

    python benchmarks/published/mooncake_cache.py

Published: LRU 0.30 at 1,000 blocks of 512 tokens, 0.40 at 10,000, 0.50 at 50,000, 0.51 without a bound, LFU no better
(arXiv 2407.00079, table 1, a trace that was not obtained); a global cache hits up to 2.36 times as much as one of 3
million tokens in each of 10 nodes, and 50 million tokens reach the theoretical maximum (FAST 2025, section 5.3). Here
the pool that serves is asked request by request, one after the other. Writes
benchmarks/results/published-mooncake-cache.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outcome import TRACES, store

from baton.core.messages import BlocksSealed, BlocksWanted, ReleaseBlocks, RequestFinished, StartPrefill
from baton.core.types import BlockHash, HostId, Request, RequestId, Sampling, WorkerId
from baton.decide.kv.blocks import EvictionOrder
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.eviction import CostAware, LeastFrequentlyUsed, LeastRecentlyUsed
from baton.lab.workload.load import read_trace
from baton.lab.workload.request import TraceRequest

BLOCK_TOKENS = 512
SIZES_BLOCKS = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000, 200_000)
NODES, NODE_TOKENS = 10, 3_000_000
EVICTIONS: dict[str, Callable[[], EvictionOrder]] = {
    "LRU": LeastRecentlyUsed,
    "LFU": LeastFrequentlyUsed,
    "cost-aware": CostAware,
}
PUBLISHED_LRU = {1_000: 0.30, 10_000: 0.40, 50_000: 0.50, 200_000: 0.51}
FILES = {"conversation": "conversation.first80.jsonl.gz", "synthetic": "synthetic.first80.jsonl.gz"}
WORKER = WorkerId("prefill")


class Cache:
    """One arena that computes one prompt after the other."""

    def __init__(self, blocks: int, eviction: Callable[[], EvictionOrder]) -> None:
        self.pool = HostPool(host=HostId("host"), blocks_total=blocks, block_tokens=BLOCK_TOKENS, eviction=eviction)
        self._blocks = blocks
        self._served = 0

    def hit_blocks(self, request: TraceRequest) -> int:
        """Compute a request's prompt and let it go. Returns how many of its blocks were there."""
        names = tuple(BlockHash(number.to_bytes(16, "little")) for number in request.prefix_ids)[: self._blocks - 2]
        self._served += 1
        name = RequestId(str(self._served))
        known = Request(
            id=name, prompt_tokens=request.input_tokens, output_tokens_max=1, arrived_at_s=request.at_s,
            sampling=Sampling(), block_hashes=names,
        )  # fmt: skip
        self.pool.handle(StartPrefill(known, 1, WORKER, "end"))
        self.pool.handle(BlocksWanted(name, 1, WORKER, len(names) + 1, names))
        hit = self.pool.table(name)[1] // BLOCK_TOKENS
        self.pool.handle(BlocksSealed(name, 1, WORKER, hit, names[hit:]))
        self.pool.handle(RequestFinished(name, 1, WORKER, "length"))
        self.pool.handle(ReleaseBlocks(name))
        return hit


def hit_ratio(requests: Sequence[TraceRequest], caches: Sequence[Cache]) -> float:
    """Deal requests to the caches in turn. Returns which share of all blocks was there."""
    hits = sum(caches[place % len(caches)].hit_blocks(request) for place, request in enumerate(requests))
    return hits / sum(len(request.prefix_ids) for request in requests)


def curves(requests: Sequence[TraceRequest]) -> dict[str, dict[int, float]]:
    return {
        name: {size: round(hit_ratio(requests, [Cache(size, eviction)]), 4) for size in SIZES_BLOCKS}
        for name, eviction in EVICTIONS.items()
    }


def one_for_all(requests: Sequence[TraceRequest]) -> dict[str, float]:
    """A cache in each node against one that all of them share, of the same size in all."""
    blocks = NODE_TOKENS // BLOCK_TOKENS
    apart = hit_ratio(requests, [Cache(blocks, LeastRecentlyUsed) for _ in range(NODES)])
    shared = hit_ratio(requests, [Cache(blocks * NODES, LeastRecentlyUsed)])
    fifty = hit_ratio(requests, [Cache(50_000_000 // BLOCK_TOKENS, LeastRecentlyUsed)])
    endless = hit_ratio(requests, [Cache(sum(len(request.prefix_ids) for request in requests) + 2, LeastRecentlyUsed)])
    return {
        "in each node": round(apart, 4),
        "global": round(shared, 4),
        "global over local": round(shared / apart, 2),
        "50 million tokens": round(fifty, 4),
        "without a bound": round(endless, 4),
    }


def main() -> None:
    figures: dict[str, object] = {"published_lru": PUBLISHED_LRU, "published_global_over_local_max": 2.36}
    for name, file in FILES.items():
        requests = read_trace(TRACES / "mooncake" / file).requests
        figures[name] = {"requests": len(requests), "hit_ratio": curves(requests), **one_for_all(requests)}
        print(name, figures[name], flush=True)
    store("mooncake-cache", figures)


if __name__ == "__main__":
    main()
