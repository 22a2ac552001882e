"""Cache-aware routing of published systems: Mooncake, Dynamo, SGLang and llm-d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel, handoff_between_s
from baton.core.types import ClusterView, HostId, Request, WorkerId, WorkerView
from baton.decide.policy.predictions import first_token_delay_s, prompt_s, queue_s
from baton.decide.policy.prefix import prefix_on
from baton.decide.policy.routing import Route
from baton.lab.policies.draws import draw


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCacheAware:
    """Use the worker with the lowest predicted TTFT, which may include pulling the longest prefix from another host.

    Source: Mooncake (FAST 2025), algorithm 1 (cache-aware prefill scheduling with cache load balancing).
    """

    balance_ratio: float = 1.0
    """Pull a remote prefix if it is longer than this multiple of the local one."""

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> Route:
        hits = cluster.prefix_hit_tokens
        best = min(hits, key=lambda host: (-hits[host], host), default=None)
        best_tokens = 0 if best is None else hits[best]
        sources = cluster.kinds_on(best)

        def left_s(worker: WorkerView, own_s: float) -> float:
            return first_token_delay_s(worker, request, cluster, cost, prompt_s=own_s)

        def key(worker: WorkerView) -> tuple[float, int, WorkerId]:
            here = hits.get(worker.host, 0)
            wait_s = queue_s(worker, cost)
            if best_tokens <= self.balance_ratio * here:
                ttft_s = prefix_on(worker, request, cluster, cost, wait_s=wait_s).ttft_s
                return (ttft_s + left_s(worker, ttft_s - wait_s), worker.running_requests, worker.id)
            kinds = {*sources, worker.kind}
            wait_s += handoff_between_s(cost, kinds, tokens=best_tokens - here, same_host=False)
            own_s = prompt_s(worker, request, best_tokens, cost)
            return (wait_s + own_s + left_s(worker, own_s), worker.running_requests, worker.id)

        chosen = min(candidates, key=key)
        fetch = best if best_tokens > self.balance_ratio * hits.get(chosen.host, 0) else None
        return Route(worker=chosen.id, fetch=fetch)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoRouter:
    """Use the worker with the lowest cost in blocks: prompt blocks to compute, minus cached blocks, plus blocks in use.

    Source: NVIDIA Dynamo 1.6.1, `lib/kv-router/src/scheduling/selector/default.rs`, with its default weights and
    temperature 0. Ties go to the lower id, where the original draws at random.
    """

    block_tokens: int = 16
    overlap_credit: float = 1.0
    prefill_load_scale: float = 1.0
    active_request_weight: float = 0.0

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        def key(worker: WorkerView) -> tuple[float, WorkerId]:
            credit = self._credit(worker, cluster)
            raw_blocks = (worker.queued_tokens + request.prompt_tokens) / self.block_tokens
            prefill = self.prefill_load_scale * max(0.0, raw_blocks - credit)
            return (prefill + self._decode_blocks(worker, request) + self._active(worker), worker.id)

        return min(candidates, key=key).id

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        # Dynamo's decode router: blocks in use, minus cached blocks.

        def key(worker: WorkerView) -> tuple[float, WorkerId]:
            blocks = max(0.0, self._decode_blocks(worker, request) - self._credit(worker, cluster))
            return (blocks + self._active(worker), worker.id)

        return min(candidates, key=key).id

    def _credit(self, worker: WorkerView, cluster: ClusterView) -> float:
        return self.overlap_credit * cluster.prefix_hit_tokens.get(worker.host, 0) / self.block_tokens

    def _decode_blocks(self, worker: WorkerView, request: Request) -> float:
        return (worker.context_tokens + request.prompt_tokens) / self.block_tokens

    def _active(self, worker: WorkerView) -> float:
        return self.active_request_weight * worker.running_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangRouter:
    """Use the host with the longest prefix hit, or the least loaded worker if load is uneven or the hit is short.

    Source: SGLang router 0.3.2, `src/policies/cache_aware.rs`, with its default thresholds. The original matches the
    characters of prompts that it routed earlier; this version matches blocks that hosts report.
    """

    cache_threshold_ratio: float = 0.3
    balance_abs_requests: int = 64
    balance_rel_ratio: float = 1.5

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        loads = [worker.running_requests for worker in candidates]
        uneven = max(loads) - min(loads) > self.balance_abs_requests
        uneven = uneven and max(loads) > self.balance_rel_ratio * min(loads)
        hits = cluster.prefix_hit_tokens
        warm = min(candidates, key=lambda worker: (-hits.get(worker.host, 0), worker.running_requests, worker.id))
        matched_ratio = hits.get(warm.host, 0) / request.prompt_tokens
        if not uneven and matched_ratio > self.cache_threshold_ratio:
            return warm.id
        return min(candidates, key=lambda worker: (worker.running_requests, worker.id)).id


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmdScorer:
    """Use the worker with the highest weighted sum of three scores from 0 to 1: short queue, free KV, prefix hit.

    Source: llm-d-router (August 2026), `pkg/epp/config/loader/defaults.go`: weights 2, 2 and 3. Ties are broken by a
    draw from the request id, where the original draws at random.
    """

    queue_weight: float = 2.0
    kv_weight: float = 2.0
    prefix_weight: float = 3.0

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        queues = [worker.queued_requests + worker.waiting_requests for worker in candidates]
        shortest, spread = min(queues), max(queues) - min(queues)

        def score(worker: WorkerView, queue: int) -> float:
            queue_score = 1.0 - (queue - shortest) / spread if spread else 1.0
            used_ratio = min(1.0, worker.context_tokens / worker.kv_tokens_max) if worker.kv_tokens_max else 0.0
            prefix_ratio = cluster.prefix_hit_tokens.get(worker.host, 0) / request.prompt_tokens
            kv_score = self.kv_weight * (1.0 - used_ratio)
            return self.queue_weight * queue_score + kv_score + self.prefix_weight * prefix_ratio

        scores = [score(worker, queue) for worker, queue in zip(candidates, queues, strict=True)]
        best = [worker for worker, value in zip(candidates, scores, strict=True) if value == max(scores)]
        return best[draw(request.id, 0, len(best))].id

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        return self.route(request, candidates, cluster, cost)
