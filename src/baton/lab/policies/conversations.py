"""Policies for later turns of conversations: ConServe keeps them on the decode worker, AMPD decides for each turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, StepShape, WorkerId, WorkerView, prompt_step
from baton.decide.cost.online import cost_of
from baton.decide.policy.predictions import decoding_requests, first_token_s
from baton.decide.policy.routing import Route
from baton.lab.policies.baselines import ShortestQueue

LATER_TURN_RATIO = 0.5
"""A prompt is a later turn of a conversation if at least this share of it is cached beside a decode worker."""


def conversation_worker(request: Request, cluster: ClusterView) -> WorkerView | None:
    """Return the decode or mixed worker whose host has the history of this request. None: it is a first turn."""
    hits = cluster.prefix_hit_tokens
    able = [worker for worker in cluster.workers if worker.role != "prefill"]
    best = min(able, key=lambda each: (-hits.get(each.host, 0), each.context_tokens, each.id), default=None)
    if best is None or hits.get(best.host, 0) < LATER_TURN_RATIO * request.prompt_tokens:
        return None
    return best


@dataclass(frozen=True, slots=True)
class ConServe:
    """Prefill a first turn on the prefill worker with the shortest queue, and run all later turns where it decoded.

    The decode worker is the one with the least KV in use. The KV of a conversation is therefore transferred once.
    Source: ConServe (arXiv 2606.01839). The original knows conversations; here cached blocks
    reveal them.
    """

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId | Route:
        pinned = conversation_worker(request, cluster)
        if pinned is not None:
            return Route(worker=pinned.id, until="end")
        return ShortestQueue().route(request, candidates, cluster, cost)

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        return min(candidates, key=lambda worker: (worker.context_tokens, worker.running_requests, worker.id)).id


@dataclass(frozen=True, slots=True)
class AmpdRouting:
    """Choose for each later turn whether a prefill worker computes it, or the decode worker that holds its history.

    The decode worker computes it if the TTFT is within the SLO and the step with its chunk is within the TPOT SLO.
    Otherwise the prefill worker with the earliest first token computes it after pulling the history.
    Source: AMPD (arXiv 2602.14516), its adaptive choice of the worker. Its order of queued prompts is not reproduced.
    """

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId | Route:
        def ttft_s(worker: WorkerView) -> tuple[float, WorkerId]:
            return (first_token_s(worker, request, cluster, cost), worker.id)

        remote, local = min(candidates, key=ttft_s), conversation_worker(request, cluster)
        if local is None:
            return remote.id
        if request.slo is None:
            is_local = ttft_s(local) <= ttft_s(remote)
        else:
            is_local = ttft_s(local)[0] <= request.slo.ttft_s
            is_local = is_local and _step_with_s(local, request, cluster, cost) <= request.slo.tpot_s
        return Route(worker=local.id, until="end") if is_local else Route(worker=remote.id, fetch=local.host)


def _step_with_s(worker: WorkerView, request: Request, cluster: ClusterView, cost: CostModel) -> float:
    """Predict the worker's next step with its decodes and the first chunk of this prompt."""
    cached_tokens = cluster.prefix_hit_tokens.get(worker.host, 0)
    new_tokens = max(1, request.prompt_tokens - cached_tokens)
    chunk = prompt_step(min(new_tokens, worker.step_tokens_max or new_tokens), cached_tokens)
    shape = StepShape(
        decode_requests=decoding_requests(worker), context_tokens=worker.context_tokens,
        prefill_tokens=chunk.prefill_tokens, prefill_chunks=1, prefill_pairs=chunk.prefill_pairs,
    )  # fmt: skip
    return cost_of(worker, cost).step_s(shape)
