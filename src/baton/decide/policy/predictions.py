"""Predictions from a worker's view that several policies share: queue, prompt, decode step and first token."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from baton.core.ports import CostModel, handoff_between_s
from baton.core.types import ClusterView, Request, StepShape, WorkerView, prefill_pairs, prompt_step
from baton.decide.cost.online import cost_of
from baton.decide.policy.batching import FIXED_COSTS_MIN, SHARED_RATIO, SHORT_CHUNK_TOKENS, pays_longer_chunk
from baton.decide.policy.prefix import prefix_on

_EMPTY, _ONE_TOKEN = StepShape(), prompt_step(1, 0)
PROMPTS_TOGETHER_MAX = 16
"""Prompts in one step up to which their time is predicted together."""
CHUNK_TOKENS_MIN = 16
"""Minimum prompt tokens per step, even if decodes leave no time; the same as in `SloChunked`."""
CHUNK_BISECTIONS = 4
"""Halvings of the interval in which the length of a chunk is searched."""
_MEDIAN_OF_POISSON = 1 / 3
"""The median of a Poisson distribution is about its mean plus this, rounded down."""
JOIN_STEPS = 1.5
"""Steps of the present decodes before a new request is in one: on average half of the running step, then one step
until its blocks are granted. Measured in simulation."""


def decoding_requests(worker: WorkerView) -> int:
    """Return the number of requests on this worker that are past their prompt, by its last report."""
    running, queued = worker.running_requests, worker.queued_requests
    return running - queued if running > queued else 0


class PromptWork(Struct, frozen=True, gc=False):
    """Prompt tokens to compute and the seconds that they take."""

    tokens: int
    alone_s: float
    """Seconds that the tokens add to steps that run anyway for decodes: the fixed cost of a step is not included."""
    context_tokens: int = 0
    """Tokens that attention reads for each of them, on average: the cached ones and half of their own prompt."""


def prompt_work(tokens: int, cached_tokens: int, model: CostModel) -> PromptWork:
    """Predict the work of `tokens` prompt tokens that follow `cached_tokens` tokens already in the cache."""
    if tokens <= 0:
        return PromptWork(0, 0.0)
    alone_s = model.prefill_s(new_tokens=tokens, cached_tokens=cached_tokens) - model.step_s(_EMPTY)
    return PromptWork(tokens, alone_s, cached_tokens + tokens // 2)


def queued_work(worker: WorkerView, model: CostModel, ttft_s: float | None = None) -> PromptWork:
    """Predict the work of the prompts in the worker's queue, as if all of them had the mean length.

    Attention is an exception: the view knows its pairs, which a long or half computed prompt has more of than the mean.
    Short prompts share steps. This takes less time than a step for each, because each step reads all weights.
    `ttft_s`: their TTFT SLO, which bounds the steps that they share. None: only the step's token limit does.
    """
    prompts = max(1, worker.queued_requests)
    tokens = max(1, worker.queued_tokens // prompts)
    together = min(prompts, worker.step_tokens_max // tokens, PROMPTS_TOGETHER_MAX)
    if together < 2:
        alone_s, context_tokens = prompts * prompt_work(tokens, 0, model).alone_s, tokens // 2
        if worker.queued_pairs > prompts * (mean_pairs := prefill_pairs(tokens, 0)):
            context_tokens = int(worker.queued_pairs / worker.queued_tokens)
            alone_s += _queue_step_s(worker, worker.queued_pairs, model)
            alone_s -= _queue_step_s(worker, prompts * mean_pairs, model)
        return PromptWork(worker.queued_tokens, alone_s, context_tokens)
    empty_s, shared_s = model.step_s(_EMPTY), model.step_s(_shared(together, tokens))
    extra_s = 0.0  # fixed cost of the further steps, unless decodes run them anyway
    if ttft_s is not None:
        bound_s = shared_step_s(ttft_s, model)
        if shared_s > bound_s:
            full, together = together, max(1, int(together * (bound_s - empty_s) / (shared_s - empty_s)))
            shared_s = model.step_s(_shared(together, tokens))
            extra_s = 0.0 if decoding_requests(worker) else (prompts / together - prompts / full) * empty_s
    return PromptWork(worker.queued_tokens, prompts / together * (shared_s - empty_s) + extra_s, tokens // 2)


def _queue_step_s(worker: WorkerView, pairs: float, model: CostModel) -> float:
    """Predict one step with all queued tokens, if their attention has so many pairs."""
    chunks = max(1, worker.queued_requests)
    return model.step_s(StepShape(prefill_tokens=worker.queued_tokens, prefill_chunks=chunks, prefill_pairs=pairs))


def shared_step_s(ttft_s: float, model: CostModel) -> float:
    """Return the longest time of a step that several prompts share, as `SloChunked` bounds it."""
    return max(SHARED_RATIO * ttft_s, FIXED_COSTS_MIN * model.step_s(_ONE_TOKEN))


def _shared(prompts: int, tokens: int) -> StepShape:
    """Return a step with whole prompts of this length."""
    pairs = prompts * prompt_step(tokens, 0).prefill_pairs
    return StepShape(prefill_tokens=prompts * tokens, prefill_chunks=prompts, prefill_pairs=pairs)


def followers_s(
    worker: WorkerView, work: PromptWork, wait_s: float, *, arriving_ratio: float, mean_tokens: float, step_s: float
) -> float:
    """Predict by how much prompts that arrive during the wait for a step extend that step, whose end they share.

    `work`: a prompt that is in the step. `arriving_ratio`: seconds of prompts that arrive per second, with a mean
    length of `mean_tokens`. `step_s`: longest step that prompts share. Returns the median, for Poisson arrivals.
    """
    if not worker.step_tokens_max or work.tokens <= 0 or decoding_requests(worker):
        return 0.0
    token_s = work.alone_s / work.tokens
    step_s = min(worker.step_tokens_max * token_s, step_s)
    last_s = (work.tokens % worker.step_tokens_max or worker.step_tokens_max) * token_s
    one_s = mean_tokens * token_s
    prompts = int(arriving_ratio * wait_s / one_s + _MEDIAN_OF_POISSON) if one_s > 0 else 0
    if last_s >= step_s or not prompts:  # a prompt that fills a step has it alone
        return 0.0
    queued_s = worker.queued_tokens * token_s
    is_alone = queued_s >= step_s * max(1, worker.queued_requests)
    taken_s = last_s if is_alone else (queued_s + work.alone_s) % step_s
    return min(prompts * one_s, step_s - taken_s)


def compute_s(
    worker: WorkerView, work: PromptWork, model: CostModel, *, step_s_max: float, spare_s: float = 0.0,
    urgent_s: float = 0.0,
) -> float:  # fmt: skip
    """Predict the time for prompt tokens, in chunks that share each step with the worker's decodes.

    A chunk has the step's token limit; with decodes, it is as long as `step_s_max` allows. If the prompt would take
    longer than `urgent_s`, the first step may take longer by `spare_s`.
    """
    if work.tokens <= 0:
        return 0.0
    most_tokens, requests = worker.step_tokens_max or work.tokens, decoding_requests(worker)
    if not requests:
        return work.alone_s + -(-work.tokens // most_tokens) * model.step_s(_EMPTY)
    beside = _ChunkSteps(
        StepShape(decode_requests=requests, context_tokens=worker.context_tokens), work.context_tokens, model
    )
    most_tokens = min(most_tokens, work.tokens)
    calm_s = beside.prompt_s(work.tokens, most_tokens, work, step_s_max)
    if spare_s <= 0.0 or calm_s <= urgent_s:
        return calm_s
    first_tokens = beside.longest(most_tokens, work, step_s_max + spare_s)
    first_s = beside.chunks_s(first_tokens, first_tokens, work)
    left_tokens = work.tokens - first_tokens
    return first_s + beside.prompt_s(left_tokens, most_tokens, work, step_s_max) if left_tokens else first_s


@dataclass(frozen=True, slots=True)
class _ChunkSteps:
    """Predicts steps that contain these decodes and a chunk of a prompt."""

    decodes: StepShape
    context_tokens: int
    """Tokens that attention reads for each token of the prompt, on average."""
    model: CostModel

    def step_s(self, tokens: int) -> float:
        return self.model.step_s(_beside(self.decodes, self._chunk(tokens)))

    def _chunk(self, tokens: int) -> StepShape:
        """Return a chunk after the mean number of earlier tokens. A whole prompt has only cached tokens before it."""
        return prompt_step(tokens, max(0, self.context_tokens - tokens // 2)) if tokens else _EMPTY

    def prompt_s(self, tokens: int, most_tokens: int, work: PromptWork, step_s_max: float) -> float:
        """Predict the time for so many tokens of the prompt, in chunks of at most `most_tokens`."""
        most_tokens = min(most_tokens, tokens)
        chunk_tokens, short_tokens = self.longest(most_tokens, work, step_s_max), min(most_tokens, SHORT_CHUNK_TOKENS)
        if chunk_tokens < short_tokens and pays_longer_chunk(self.step_s, chunk_tokens, short_tokens, step_s_max):
            chunk_tokens = short_tokens
        return self.chunks_s(tokens, chunk_tokens, work)

    def chunks_s(self, tokens: int, chunk_tokens: int, work: PromptWork) -> float:
        """Predict the time for so many tokens of the prompt, in chunks of this length."""
        token_s, beside_s = self.prices(chunk_tokens, work)
        return tokens * token_s + -(-tokens // chunk_tokens) * beside_s

    def longest(self, most_tokens: int, work: PromptWork, step_s_max: float) -> int:
        """Return about the longest chunk for which the step takes at most `step_s_max`, up to `most_tokens`."""
        fitting_tokens = int((step_s_max - self.step_s(0)) / max(1e-12, work.alone_s / work.tokens))
        tokens = min(most_tokens, max(CHUNK_TOKENS_MIN, fitting_tokens))
        if self.step_s(tokens) > step_s_max:
            return self.largest(min(CHUNK_TOKENS_MIN, tokens), tokens, step_s_max)
        while tokens < most_tokens:  # cheaper in a step that reads the weights for the decodes anyway
            more_tokens = min(most_tokens, 2 * tokens)
            if self.step_s(more_tokens) > step_s_max:
                return self.largest(tokens, more_tokens, step_s_max)
            tokens = more_tokens
        return tokens

    def largest(self, fitting_tokens: int, over_tokens: int, step_s_max: float) -> int:
        """Return about the largest chunk for which the step takes at most `step_s_max`.

        A bisection, because the time of a step can jump: engines launch steps above some number of tokens more slowly.
        """
        for _ in range(CHUNK_BISECTIONS):
            middle = (fitting_tokens + over_tokens) // 2
            if self.step_s(middle) <= step_s_max:
                fitting_tokens = middle
            else:
                over_tokens = middle
        return fitting_tokens

    def prices(self, tokens: int, work: PromptWork) -> tuple[float, float]:
        """Predict the seconds per token of a chunk, and those of the decodes in the same step and of its start.

        Small chunks use a GPU less well than the whole prompt. The decodes take less than they do alone where one read
        of the weights serves both.
        """
        empty_s, chunk_s = self.model.step_s(_EMPTY), self.model.step_s(self._chunk(tokens))
        token_s = max(work.alone_s / work.tokens, (chunk_s - empty_s) / tokens)
        return token_s, self.step_s(tokens) - chunk_s + empty_s


def _beside(decodes: StepShape, chunk: StepShape) -> StepShape:
    """Return a step with these decodes and a chunk of a prompt."""
    return StepShape(
        decode_requests=decodes.decode_requests, context_tokens=decodes.context_tokens,
        prefill_tokens=chunk.prefill_tokens, prefill_chunks=chunk.prefill_chunks, prefill_pairs=chunk.prefill_pairs,
    )  # fmt: skip


def join_s(worker: WorkerView, model: CostModel) -> float:
    """Predict the wait for the running decodes before a new request is in a step. 0 on a worker that is not decoding.

    Where prompts wait, the request asks for its blocks while they are computed.
    """
    return JOIN_STEPS * answer_step_s(worker, 0, 0, model) if decoding_requests(worker) else 0.0


def ahead_s(worker: WorkerView, at_s: float, model: CostModel) -> float:
    """Predict by how many seconds all answers of a worker will be ahead of their pace at a time. At least 0.

    Since the report they have gained with each step that took less than the pace.
    """
    if worker.pace is None or not decoding_requests(worker):
        return 0.0
    elapsed_s = max(0.0, at_s - worker.observed_at_s)
    gained_s = elapsed_s * (worker.pace.token_s / answer_step_s(worker, 0, 0, model) - 1.0)
    return max(0.0, worker.pace.ahead_s + gained_s)


def under_way_s(worker: WorkerView, queue_s: float, since_s: float, *, step_s_max: float) -> float:
    """Return the part of `queue_s`, the predicted time for the queued prompts, that the running step has computed.

    A worker reports after its steps, so its queue contains the prompts of the running one, which began `since_s`
    seconds ago.
    """
    step_s = queue_s * min(1.0, (worker.step_tokens_max or worker.queued_tokens) / worker.queued_tokens)
    if decoding_requests(worker):
        step_s = min(step_s, step_s_max)
    return min(step_s, max(0.0, since_s))


def queue_ahead(worker: WorkerView) -> tuple[WorkerView, WorkerView]:
    """Return the mean view of a worker while it computes its queue, and the view afterwards.

    On a mixed worker, requests whose prompt is computed decode there, and slow down the prompts behind them.
    """
    if worker.role != "mixed":
        return worker, worker
    return replace(worker, queued_requests=worker.queued_requests // 2), replace(worker, queued_requests=0)


def queue_s(worker: WorkerView, cost: CostModel) -> float:
    """Predict how long the worker needs for the prompts in its queue, as if all of them had the mean length."""
    if not worker.queued_tokens:
        return 0.0
    prompts = max(1, worker.queued_requests)
    return prompts * cost_of(worker, cost).prefill_s(new_tokens=worker.queued_tokens // prompts, cached_tokens=0)


def prompt_s(worker: WorkerView, request: Request, hit_tokens: int, cost: CostModel) -> float:
    """Predict how long the worker needs for this prompt alone, after `hit_tokens` cached tokens."""
    new_tokens = max(0, request.prompt_tokens - hit_tokens)
    return cost_of(worker, cost).prefill_s(new_tokens=new_tokens, cached_tokens=hit_tokens)


def decode_step_s(worker: WorkerView, cost: CostModel, *, more_requests: int = 0, more_tokens: int = 0) -> float:
    """Predict the seconds of the worker's next step if all of its requests decode.

    `more_requests`, with `more_tokens` tokens of context in all, decode with them.
    """
    shape = StepShape(
        decode_requests=worker.running_requests + more_requests,
        context_tokens=worker.context_tokens + more_tokens,
    )
    return cost_of(worker, cost).step_s(shape)


def answer_step_s(worker: WorkerView, more_requests: int, more_tokens: int, model: CostModel) -> float:
    """Predict the ITL on a worker with these requests added. Requests beyond the batch limit take turns."""
    running, queued, places = worker.running_requests, worker.queued_requests, worker.requests_max
    requests = more_requests + (running - queued if running > queued else 0)  # `decoding_requests`, without its call
    step_s = model.step_s(StepShape(decode_requests=requests, context_tokens=worker.context_tokens + more_tokens))
    return requests / places * step_s if 0 < places < requests else step_s


def coming_requests(cluster: ClusterView) -> float:
    """Predict the further requests per decode worker, besides the bound ones, once all prompts are computed."""
    decoders = len(cluster.having("decode"))
    queued = sum(worker.queued_requests for worker in cluster.workers if worker.role == "prefill")
    queued -= sum(load.requests for load in cluster.bound.values())
    return max(0, queued) / decoders if decoders else 0.0


def first_token_s(worker: WorkerView, request: Request, cluster: ClusterView, cost: CostModel) -> float:
    """Predict the TTFT on this worker: its queue, the uncached part of the prompt, and the handoff where one is needed.

    Blocks in the tiers are read while the worker computes its queue, if reading them pays.
    """
    wait_s = queue_s(worker, cost)
    computed_s = prefix_on(worker, request, cluster, cost, wait_s=wait_s).ttft_s
    return computed_s + first_token_delay_s(worker, request, cluster, cost, prompt_s=computed_s - wait_s)


def first_token_delay_s(
    worker: WorkerView, request: Request, cluster: ClusterView, cost: CostModel, *, prompt_s: float
) -> float:
    """Predict the time from the end of the prompt, which takes `prompt_s`, to the first token.

    0 where this worker samples the first token itself, as a mixed worker always does. Otherwise: the handoff to the
    nearest decode worker and one step there. KV that is streamed during the prompt leaves only the part that the link
    has not sent yet, which is at least the last chunk.
    """
    if cluster.first_token_by == "prefill" or worker.role == "mixed":
        return 0.0
    decoders = cluster.having("decode")
    if not decoders:
        return 0.0
    tokens, is_here = request.prompt_tokens - 1, any(decoder.host == worker.host for decoder in decoders)
    kinds = {decoder.kind for decoder in decoders if not is_here or decoder.host == worker.host}

    def handoff_s(tokens: int) -> float:
        return min(handoff_between_s(cost, {worker.kind, kind}, tokens=tokens, same_host=is_here) for kind in kinds)

    left_s = handoff_s(tokens)
    if cluster.is_sent_ahead and not is_here:
        left_s = max(left_s - prompt_s, handoff_s(min(tokens, worker.step_tokens_max or tokens)))
    return left_s + min(_joined_step_s(decoder, request, cost) for decoder in decoders)


def _joined_step_s(decoder: WorkerView, request: Request, cost: CostModel) -> float:
    """Predict a decode step of a worker after this request has joined its batch."""
    tokens = decoder.context_tokens + request.prompt_tokens
    shape = StepShape(decode_requests=decoding_requests(decoder) + 1, context_tokens=tokens)
    return cost_of(decoder, cost).step_s(shape)


def kv_free_tokens(worker: WorkerView) -> float:
    """Return the KV tokens left in the arena after this worker's own requests. Infinite where the size is not known."""
    if worker.kv_tokens_max == 0:
        return float("inf")
    return worker.kv_tokens_max - worker.context_tokens


def with_bound(cluster: ClusterView) -> ClusterView:
    """Return the view as if all requests bound to a worker already decoded there.

    Use it to place a request whose prompt is still to be computed: the bound requests decode by then. Requests that
    decode now may have finished by then, so the load is an upper bound.
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
