"""What a view means in seconds: the predictions that several policies share."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, StepShape, WorkerView
from baton.decide.policy.prefix import prefix_on
from baton.decide.policy.routing import queue_s
from baton.decide.policy.telling import first_token_delay_s


def first_token_s(worker: WorkerView, request: Request, cluster: ClusterView, cost: CostModel) -> float:
    """Predict how long the first token takes on this worker: its queue, then what its host does not hold already.

    What its tiers hold is read while the queue is worked off, as far as that pays. Where whoever decodes draws it, the
    handoff lies before it.
    """
    wait_s = queue_s(worker, cost)
    prompt_s = prefix_on(worker, request, cluster, cost, wait_s=wait_s).ttft_s
    return prompt_s + first_token_delay_s(worker, request, cluster, cost, prompt_s=prompt_s - wait_s)


def prompt_s(worker: WorkerView, request: Request, hit_tokens: int, cost: CostModel) -> float:
    """Predict how long the prompt takes on this worker, alone, after `hit_tokens` that need no work."""
    new_tokens = max(0, request.prompt_tokens - hit_tokens)
    return cost.on(worker.kind).prefill_s(new_tokens=new_tokens, cached_tokens=hit_tokens)


def decode_step_s(worker: WorkerView, cost: CostModel, *, more_requests: int = 0, more_tokens: int = 0) -> float:
    """Predict this worker's next step if all that it has decodes, and `more_requests` of `more_tokens` with it."""
    shape = StepShape(
        decode_requests=worker.running_requests + more_requests,
        context_tokens=worker.context_tokens + more_tokens,
    )
    return cost.on(worker.kind).step_s(shape)


def kv_free_tokens(worker: WorkerView) -> float:
    """Tokens of KV that the worker's arena has room for, as far as its own requests go. Unlimited where untold."""
    if worker.kv_tokens_max == 0:
        return float("inf")
    return worker.kv_tokens_max - worker.context_tokens


def with_bound(cluster: ClusterView) -> ClusterView:
    """The cluster as if all that is bound to a worker decoded there already: as it will be when a prompt is computed.

    A placement for later has to look at it so. What decodes now may have ended by then, so it is no less than there is.
    """
    if not cluster.bound:
        return cluster
    return replace(cluster, workers=tuple(_with_bound(worker, cluster) for worker in cluster.workers), bound={})


def _with_bound(worker: WorkerView, cluster: ClusterView) -> WorkerView:
    load = cluster.bound.get(worker.id)
    if load is None:
        return worker
    return replace(
        worker,
        running_requests=worker.running_requests + load.requests,
        context_tokens=worker.context_tokens + load.tokens,
    )
