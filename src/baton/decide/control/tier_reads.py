"""Reads from tiers if they are cheaper than a recompute: for starts, and for preempted requests (swap-in)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from baton.core.kv_config import Preemption
from baton.core.messages import StartPrefill
from baton.core.ports import CostModel
from baton.core.tier_messages import ReadBack, ReadBackWanted
from baton.core.types import HostId, Request, TierHit, WorkerId
from baton.decide.control.host_pools import HostPools, known_hashes
from baton.decide.control.transfer import Start
from baton.decide.policy.prefix import best_prefix


@dataclass(frozen=True, slots=True)
class TierReads:
    """Decides how much KV is read from tiers."""

    hosts: HostPools
    cost: CostModel

    def hits(self, request: Request) -> dict[HostId, tuple[TierHit, ...]]:
        """Return, by host, the prefixes of a prompt that reads from tiers would make available, the shortest first.

        Empty for a request for prompt log probabilities: every prompt token has to be computed for them.
        """
        hosts = [host for host, pool in self.hosts.pools.items() if pool.tiers is not None]
        if not hosts or request.sampling.prompt_logprobs:
            return {}
        hits = {host: self.hosts.tier_hits(host, self.hosts.prefix_hashes(host, request)) for host in hosts}
        return {host: found for host, found in hits.items() if found}

    def tokens_for_start(self, start: Start, *, target: HostId, source: HostId | None) -> int:
        """Return how many leading tokens of a request to read from the tiers of its host. 0: a read is not worth it.

        For the first attempt of a prompt, the coordinator has decided at the arrival. Any other start reads if that is
        faster than recomputing the KV that neither the arena nor the host `source` has. A decode whose host
        was lost reads the sealed blocks of its answer, too.
        """
        tiers, request = self.hosts.pools[target].tiers, start.request
        if tiers is None or request.sampling.prompt_logprobs:
            return 0
        tokens = max(self.hosts.tokens_at(target, start), self.hosts.tokens_at(source, start))
        hashes = known_hashes(self.hosts, target, start)
        hits = self.hosts.tier_hits(target, hashes)
        if isinstance(start, StartPrefill) and start.attempt == 1:
            wanted_tokens = min(start.read_tokens, max((hit.tokens for hit in hits), default=0))
        else:
            known_tokens = max(request.prompt_tokens, len(hashes) * self.hosts.pools[target].block_tokens + 1)
            wanted_tokens = best_prefix(known_tokens, tokens, hits, self._cost(start.worker)).tokens
        if wanted_tokens > tokens:
            return wanted_tokens
        if source is None or source == target:
            tiers.decline(hashes)
        return 0

    def swap_in(self, wanted: ReadBackWanted, number: int) -> ReadBack:
        """Decide how much KV of a preempted request to swap in, by the tiers' contents and predicted times."""
        pool, cost = self.hosts.pools[wanted.host], self._cost(wanted.worker)
        assert pool.tiers is not None, f"{wanted.host} wants to read {wanted.request_id} back, and has no tiers"
        held_tokens = pool.tiers.held_blocks(wanted.hashes) * pool.block_tokens
        full_tokens, hits = len(wanted.hashes) * pool.block_tokens, self.hosts.tier_hits(wanted.host, wanted.hashes)
        tokens = read_back_tokens(pool.tiers.preemption, full_tokens, held_tokens, hits, cost, beside=wanted.beside)
        if hits and tokens <= held_tokens and pool.tiers.preemption == "cheaper":
            pool.tiers.decline(wanted.hashes)
        return ReadBack(wanted.request_id, number, tokens)

    def _cost(self, worker: WorkerId) -> CostModel:
        """Return the cost model of a worker's hardware; of the default hardware if the worker is lost."""
        view = self.hosts.workers.get(worker)
        return self.cost.on(view.kind if view is not None else "")


def read_back_tokens(
    preemption: Preemption, tokens: int, held_tokens: int, tier_hits: Sequence[TierHit], cost: CostModel, *, beside: int
) -> int:
    """Return the leading tokens that the request has after a swap-in; `held_tokens` if no block is read.

    `tokens`: tokens of the full blocks that the request had. `cost`: of the worker that continues the request.
    `beside`: other requests on that worker. `cheaper` minimizes the seconds lost by all requests together: a read
    delays this request alone, a recompute lengthens steps that the others wait for.
    """

    def lost_s(hit: TierHit) -> float:
        # At least one token is computed in any case, so a read never saves a whole step, only tokens of it.
        rest_s = cost.prefill_s(new_tokens=tokens + 1 - hit.tokens, cached_tokens=hit.tokens)
        return hit.load_s + (1 + beside) * rest_s

    choices = [TierHit(held_tokens, 0.0), *tier_hits]
    match preemption:
        case "recompute":
            return held_tokens
        case "swap":
            return choices[-1].tokens
        case "cheaper":
            return min(choices, key=lost_s).tokens
        case _:
            assert_never(preemption)
