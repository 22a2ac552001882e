"""Prefix hits of prompts on all hosts, in tokens, because hosts may have different block sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.ports import CostModel
from baton.core.prefixes import BlocksRemoved, BlocksStored
from baton.core.types import ClusterView, HostId, Request, WorkerView
from baton.decide.kv.hashing import hashes_per_block
from baton.decide.kv.prefix_index import PrefixIndex
from baton.decide.kv.window import Window
from baton.decide.policy.predictions import queue_s
from baton.decide.policy.prefix import prefix_on


@dataclass(slots=True)
class Prefixes:
    """A prefix index for hosts with different block sizes, bounded as `PrefixIndex`."""

    _index: PrefixIndex = field(default_factory=PrefixIndex)
    _block_runs: dict[HostId, int] = field(default_factory=dict[HostId, int])
    """Hashes per block, for hosts whose blocks have more than one."""

    def note(self, event: BlocksStored | BlocksRemoved) -> None:
        """Record that a host has stored or evicted blocks."""
        if isinstance(event, BlocksRemoved):
            self._index.remove(event.host, event.hashes)
            return
        self._index.store(event.host, event.hashes)
        if event.block_runs > 1:
            self._block_runs[event.host] = event.block_runs

    def forget(self, host: HostId) -> None:
        """Remove a lost host."""
        self._index.forget(host)
        self._block_runs.pop(host, None)

    def hit_tokens(self, request: Request, block_tokens: int, window: Window | None) -> dict[HostId, int]:
        """Return the number of leading prompt tokens that each host holds. The last token never counts: it is computed.

        `block_tokens`: tokens per hash of a prompt. `window`: the model's attention window.
        """
        if not request.block_hashes:
            return {}
        longest = max(0, request.prompt_tokens - 1)
        hits = self._index.hit_blocks(request.block_hashes, window, block_tokens)
        hit_tokens = {host: min(blocks * block_tokens, longest) for host, blocks in hits.items()}
        for runs in sorted({*self._block_runs.values()}):
            hashes, large_tokens = hashes_per_block(request.block_hashes, runs), runs * block_tokens
            for host, blocks in self._index.hit_blocks(hashes, window, large_tokens).items():
                if self._block_runs.get(host) == runs:
                    hit_tokens[host] = min(blocks * large_tokens, longest)
        return hit_tokens


def read_tokens(request: Request, worker: WorkerView, cluster: ClusterView, cost: CostModel) -> int:
    """Return the number of leading prompt tokens to read from the tiers of the worker's host. 0: none."""
    if worker.host not in cluster.tier_hits:
        return 0
    prefix = prefix_on(worker, request, cluster, cost, wait_s=queue_s(worker, cost))
    return prefix.tokens if prefix.tokens > cluster.prefix_hit_tokens.get(worker.host, 0) else 0
