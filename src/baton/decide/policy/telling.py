"""What lies between the end of a prompt and its first token, where that is left to whoever decodes."""

from __future__ import annotations

from baton.core.ports import CostModel, handoff_between_s
from baton.core.types import ClusterView, Request, StepShape, WorkerView
from baton.decide.policy.work import decodes


def first_token_delay_s(
    worker: WorkerView, request: Request, cluster: ClusterView, cost: CostModel, *, prompt_s: float
) -> float:
    """Predict how long after this worker's work on the prompt, which takes `prompt_s`, its first token comes.

    Nothing where this worker draws it, as one that goes on with its prompts does. Else the way of the KV to the nearest
    of those that decode, and a step there. What is sent ahead while the prompt is computed is still to come only as far
    as the wire is behind, and at least what was computed last.
    """
    if cluster.first_token_by == "prefill" or worker.role == "mixed":
        return 0.0
    decoders = cluster.having("decode")
    if not decoders:
        return 0.0
    tokens, is_here = request.prompt_tokens - 1, any(decoder.host == worker.host for decoder in decoders)
    kinds = {decoder.kind for decoder in decoders if not is_here or decoder.host == worker.host}

    def way_s(tokens: int) -> float:
        return min(handoff_between_s(cost, {worker.kind, kind}, tokens=tokens, same_host=is_here) for kind in kinds)

    left_s = way_s(tokens)
    if cluster.is_sent_ahead and not is_here:
        left_s = max(left_s - prompt_s, way_s(min(tokens, worker.step_tokens_max or tokens)))
    return left_s + min(_next_step_s(decoder, request, cost) for decoder in decoders)


def _next_step_s(decoder: WorkerView, request: Request, cost: CostModel) -> float:
    """Predict a step of a worker with this request in it beside those that decode there."""
    tokens = decoder.context_tokens + request.prompt_tokens
    shape = StepShape(decode_requests=decodes(decoder) + 1, context_tokens=tokens)
    return cost.on(decoder.kind).step_s(shape)
