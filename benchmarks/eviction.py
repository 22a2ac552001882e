"""Which blocks stay: prefix hits of real traces over the size of a pool, per eviction policy, beside an upper bound.

    python benchmarks/eviction.py [--requests N] [--trace NAME] [--pool-blocks N ...]

Every request of a trace, in order: its leading blocks that the pool holds are hits, the rest is taken, sealed and let
go, by the same `Blocks` and policies that serve. The bound is Belady's: it knows the future and gives up what is needed
last. `local` deals the requests to nodes in turn, each with its share of the room. Writes
benchmarks/results/eviction.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from time import perf_counter

from record import write

from baton.core.types import BlockHash
from baton.decide.kv.blocks import BlockFacts, Blocks, EvictionOrder
from baton.decide.policy.eviction import CostAware, LeastFrequentlyUsed, LeastRecentlyUsed
from baton.lab.workload.load import read_trace

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT.parent / "shared" / "traces"
FILES = {
    "conversation": "mooncake/conversation.first80.jsonl.gz",
    "synthetic": "mooncake/synthetic.first80.jsonl.gz",
    "online_pd": "rtpllm/online_pd.first80.jsonl.gz",
}
POLICIES: dict[str, Callable[[], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "cost-aware": CostAware,
}
POOLS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
NODES = (4, 20)
EVEN_TOKENS = 30_000
"""As in `CostAware`: what a token costs to compute grows by itself over so many tokens before it."""


@dataclass(slots=True)
class Chains:
    """The prompts of a trace as chains of full blocks, and the tokens of whole prompts."""

    prompts: list[tuple[BlockHash, ...]]
    block_tokens: int
    input_tokens: int


@dataclass(slots=True)
class Hits:
    """What a pool saved."""

    blocks: int = 0
    cost: float = 0.0
    """In tokens: each counts one, and what attention to those before it costs."""

    def add(self, count: int, block_tokens: int) -> None:
        tokens = count * block_tokens
        self.blocks += count
        self.cost += tokens + tokens * tokens / (2 * EVEN_TOKENS)


def chains(name: str, requests_max: int) -> Chains:
    """Read a trace. The last block of a prompt may be partial: nobody can find that."""
    requests = read_trace(TRACES / FILES[name]).requests[:requests_max]
    block_tokens = next(request.prefix_block_tokens for request in requests if request.prefix_block_tokens)
    prompts = [
        tuple(BlockHash(part.to_bytes(8)) for part in request.prefix_ids[: request.input_tokens // block_tokens])
        for request in requests
    ]
    return Chains(prompts, block_tokens, sum(request.input_tokens for request in requests))


def play(made: Chains, prompts: Sequence[tuple[BlockHash, ...]], pool_blocks: int, order: EvictionOrder) -> Hits:
    """Let one pool see the prompts one after the other."""
    blocks, hits = Blocks(pool_blocks, order), Hits()
    for prompt in prompts:
        fits = prompt[:pool_blocks]
        found = blocks.hit(fits, None, made.block_tokens).blocks
        hits.add(len(found), made.block_tokens)
        blocks.pin(found)
        taken, _ = blocks.take(len(fits) - len(found))
        parent = fits[len(found) - 1] if found else None
        for depth, (block, name) in enumerate(zip(taken, fits[len(found) :], strict=True), len(found)):
            blocks.seal(block, BlockFacts(name, parent, depth * made.block_tokens))
            parent = name
        blocks.unpin([*found, *taken])
    return hits


def play_bound(made: Chains, pool_blocks: int) -> Hits:
    """Give up the block that is needed latest. A block is needed no later than those behind it: chains stay whole."""
    never, last_use, next_use = len(made.prompts), dict[BlockHash, int](), list[list[int]]()
    for index in range(len(made.prompts) - 1, -1, -1):
        next_use.append([last_use.get(name, never) for name in made.prompts[index]])
        last_use.update(dict.fromkeys(made.prompts[index], index))
    next_use.reverse()
    held: dict[BlockHash, int] = {}
    latest: list[tuple[int, int, BlockHash]] = []
    hits = Hits()
    for prompt, uses in zip(made.prompts, next_use, strict=True):
        count = next((depth for depth, name in enumerate(prompt) if name not in held), len(prompt))
        hits.add(count, made.block_tokens)
        for depth, (name, use) in enumerate(zip(prompt, uses, strict=True)):
            held[name] = use
            heappush(latest, (-use, -depth, name))
        while len(held) > pool_blocks:
            use, _, name = heappop(latest)
            if held.get(name) == -use:
                del held[name]
    return hits


def ratios(made: Chains, hits: Hits) -> dict[str, float]:
    lengths = [len(prompt) * made.block_tokens for prompt in made.prompts]
    cost = sum(tokens + tokens * tokens / (2 * EVEN_TOKENS) for tokens in lengths)
    return {"hit_ratio": hits.blocks * made.block_tokens / made.input_tokens, "saved_cost_ratio": hits.cost / cost}


def compare(made: Chains, pools: Sequence[int]) -> list[dict[str, object]]:
    """Play every policy and the bound on every size of pool."""
    rows: list[dict[str, object]] = []
    for pool_blocks in pools:
        for name, new in POLICIES.items():
            began_s = perf_counter()
            found = ratios(made, play(made, made.prompts, pool_blocks, new()))
            rows.append({"pool_blocks": pool_blocks, "policy": name, **found, "wall_s": perf_counter() - began_s})
        rows.append({"pool_blocks": pool_blocks, "policy": "bound", **ratios(made, play_bound(made, pool_blocks))})
    return rows


def compare_nodes(made: Chains, pools: Sequence[int]) -> list[dict[str, object]]:
    """One cache of the cluster, against as many local ones with the same room together. LRU in both."""
    rows: list[dict[str, object]] = []
    for pool_blocks in pools:
        whole = play(made, made.prompts, pool_blocks, LeastRecentlyUsed()).blocks
        for nodes in NODES:
            parts = [made.prompts[node::nodes] for node in range(nodes)]
            local = sum(play(made, part, pool_blocks // nodes, LeastRecentlyUsed()).blocks for part in parts)
            rows.append(
                {
                    "pool_blocks": pool_blocks,
                    "nodes": nodes,
                    "global_hit_ratio": whole * made.block_tokens / made.input_tokens,
                    "local_hit_ratio": local * made.block_tokens / made.input_tokens,
                    "global_by_local": whole / local if local else None,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="most requests of each trace")
    parser.add_argument("--trace", choices=sorted(FILES), help="only this one")
    parser.add_argument("--pool-blocks", type=int, nargs="+", default=list(POOLS), help="sizes of the pool")
    options = parser.parse_args()
    results: dict[str, object] = {}
    for name in [options.trace] if options.trace else FILES:
        made = chains(name, options.requests)
        results[name] = {
            "requests": len(made.prompts),
            "input_tokens": made.input_tokens,
            "block_tokens": made.block_tokens,
            "different_blocks": len({block for prompt in made.prompts for block in prompt}),
            "policies": compare(made, options.pool_blocks),
            "nodes": compare_nodes(made, options.pool_blocks),
        }
    write("eviction", results)


if __name__ == "__main__":
    main()
