"""Forecasts for the default policy: the answers that decode on each worker, and the prompts that slow them down."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

from msgspec import Struct

from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, Slo, StepShape, WorkerId, WorkerView
from baton.decide.cost.online import cost_of, price_ratio
from baton.decide.policy.arena_room import TIME_S_MIN, AnswerLengths
from baton.decide.policy.batching import PACE_RATIO
from baton.decide.policy.predictions import (
    PromptWork,
    answer_step_s,
    coming_requests,
    decoding_requests,
    followers_s,
    shared_step_s,
)

PROMPTS_RATIO_MAX = 0.95
"""Maximum share of prompts in a worker's time. Above it, prompts are delayed."""
KNOWN_RATIO_MIN = 0.25
"""Until prompts were observed for this share of the decay time, their share of time counts as if they had been."""
_PROMPT_GAIN = 0.05
"""Weight of a new prompt in the mean length of recent prompts."""


@dataclass(slots=True)
class PromptShare:
    """Seconds of recent prompt work on a worker, by the given prices and with exponential decay."""

    began_s: float
    """Time of the first prompt, before which the sum has no work."""
    prompts_s: float = 0.0
    at_s: float = 0.0

    def at(self, now_s: float, memory_s: float) -> float:
        return self.prompts_s * exp((self.at_s - now_s) / memory_s) if now_s > self.at_s else self.prompts_s


class TpotForecast(Struct, frozen=True, gc=False):
    """The predicted TPOT of a request on a worker."""

    tpot_s: float
    load_s: float
    """The TPOT if prompts were computed in chunks of full length: above `tpot_s`, prompts are delayed instead."""
    prompts_ratio: float
    """Share of the worker's time for prompts. Above 1 if the worker is behind."""


@dataclass(slots=True)
class AnswerForecast:
    """Predicts the TPOT on each worker from its decodes, the expected answers and its recent prompts."""

    output_tokens: float
    """Expected answer length until some requests have finished."""
    now_s: float = 0.0
    prompt_tokens: float = 0.0
    """Mean of the recent prompts without their cached tokens: the length of the next prompt."""
    shares: dict[WorkerId, PromptShare] = field(default_factory=dict[WorkerId, PromptShare])
    """Workers that have computed prompts."""
    answers: AnswerLengths = field(init=False)
    _alone: tuple[Request | None, CostModel | None, Slo] = (None, None, Slo(ttft_s=TIME_S_MIN, tpot_s=TIME_S_MIN))
    """Cache: the latencies that the last request would have on an idle worker."""

    def __post_init__(self) -> None:
        self.answers = AnswerLengths(self.output_tokens)

    def note_prompt(
        self, request: Request, worker: WorkerView, work: PromptWork, cluster: ClusterView, cost: CostModel
    ) -> None:
        """Record that a worker will compute a prompt."""
        model, share = cost_of(worker, cost), self.shares.setdefault(worker.id, PromptShare(self.now_s))
        recent_s = share.at(self.now_s, self.memory_s(request, worker, cluster, model))
        share.prompts_s = recent_s + work.alone_s / price_ratio(model, request.prompt_tokens)
        share.at_s = self.now_s
        gain = _PROMPT_GAIN if self.prompt_tokens else 1.0
        self.prompt_tokens += gain * (work.tokens - self.prompt_tokens)
        if len(self.shares) > 2 * len(cluster.workers):
            present = {worker.id for worker in cluster.workers}
            self.shares = {worker: share for worker, share in self.shares.items() if worker in present}

    def life_s(self, worker: WorkerView, cluster: ClusterView, model: CostModel) -> float:
        """Return how long an answer decodes on this worker at its present pace."""
        return max(TIME_S_MIN, self.answers.on(worker, cluster) * answer_step_s(worker, 0, 0, model))

    def place_s(self, worker: WorkerView, cluster: ClusterView, model: CostModel) -> float:
        """Predict the time until the batch has a free place: enough decodes must finish first.

        Requests whose prompt waits have a place, too, or will have one before this request.
        """
        decodes, too_many = decoding_requests(worker), worker.running_requests + 1 - worker.requests_max
        if not worker.requests_max or too_many <= 0 or not decodes:
            return 0.0
        return too_many * self.life_s(worker, cluster, model) / min(decodes, worker.requests_max)

    def memory_s(self, request: Request, worker: WorkerView, cluster: ClusterView, model: CostModel) -> float:
        """Return how long an answer decodes on this worker at its TPOT SLO: the decay time of `PromptShare`."""
        return self.answers.on(worker, cluster) * self.slo(request, model).tpot_s

    def slo(self, request: Request, model: CostModel) -> Slo:
        """Return the SLO of the request. Without one: the latencies that it would have on an idle worker."""
        return self.alone(request, model) if request.slo is None else request.slo

    def alone(self, request: Request, model: CostModel) -> Slo:
        """Return the latencies that the request would have on an idle worker."""
        asked, of, slo = self._alone
        if request is not asked or model is not of:
            alone = StepShape(decode_requests=1, context_tokens=request.prompt_tokens)
            slo = Slo(
                ttft_s=max(TIME_S_MIN, model.prefill_s(new_tokens=request.prompt_tokens, cached_tokens=0)),
                tpot_s=max(TIME_S_MIN, model.step_s(alone)),
            )
            self._alone = (request, model, slo)
        return slo

    def recent_s(self, request: Request, worker: WorkerView, model: CostModel, memory_s: float) -> float:
        """Return the seconds of prompt work that the answers of this worker have waited for recently."""
        share = self.shares.get(worker.id)
        if share is None:
            return 0.0
        return share.at(self.now_s, memory_s) * price_ratio(model, request.prompt_tokens)

    def followers_s(
        self, request: Request, worker: WorkerView, cluster: ClusterView, model: CostModel,
        work: PromptWork, wait_s: float,
    ) -> float:  # fmt: skip
        """Predict by how much prompts that arrive within `wait_s` extend the step of a prompt.

        Prompts are assumed to arrive at this worker as in the recent past.
        """
        share = self.shares.get(worker.id)
        if share is None or request.slo is None:
            return 0.0
        memory_s = self.memory_s(request, worker, cluster, model)
        arriving_ratio = self.recent_s(request, worker, model, memory_s) / memory_s / self._known_ratio(share, memory_s)
        return followers_s(
            worker, work, wait_s,
            arriving_ratio=arriving_ratio,
            mean_tokens=self.prompt_tokens,
            step_s=shared_step_s(request.slo.ttft_s, model),
        )  # fmt: skip

    def _known_ratio(self, share: PromptShare, memory_s: float) -> float:
        """Return the share of its final value that the decaying sum of a constant load has since the first prompt."""
        return 1.0 - exp(-max(KNOWN_RATIO_MIN * memory_s, self.now_s - share.began_s) / memory_s)

    def predict(
        self,
        worker: WorkerView,
        request: Request,
        cluster: ClusterView,
        cost: CostModel,
        since: tuple[ClusterView, float] | None = None,
    ) -> TpotForecast:
        """Predict the TPOT of a request that decodes on this worker.

        `since`: the present cluster, and the time until the request decodes, in which answers end and begin. None: now.
        Prompts are assumed to keep their recent share of the worker's time, and the tokens take the rest. Tokens wait
        for prompts up to the step time that `SloChunked` allows.
        """
        model, share = cost_of(worker, cost), self.shares.get(worker.id)
        requests, tokens = 1, request.prompt_tokens
        if since is not None:
            more = self._coming(worker, cluster, model, since)
            requests += round(more)
            tokens += round(more * ((worker.context_tokens + tokens) / (decoding_requests(worker) + 1)))
        alone_s = answer_step_s(worker, requests, tokens, model)
        if share is None:
            return TpotForecast(alone_s, alone_s, 0.0)
        memory_s = self.memory_s(request, worker, cluster, model)
        prompts_ratio = self.recent_s(request, worker, model, memory_s) / memory_s
        free_s = alone_s + prompts_ratio * self.slo(request, model).tpot_s
        # An answer below its TPOT SLO ends sooner than `memory_s`, so fewer prompts come during it.
        expected_ratio = min(PROMPTS_RATIO_MAX, prompts_ratio / self._known_ratio(share, memory_s))
        expected_s = self.bounded_s(request, alone_s, alone_s / (1.0 - expected_ratio))
        return TpotForecast(expected_s, free_s, prompts_ratio)

    def _coming(
        self, worker: WorkerView, cluster: ClusterView, model: CostModel, since: tuple[ClusterView, float]
    ) -> float:
        """Predict how many more answers decode on a worker than now. `since`: as of `predict`."""
        present, after_s = since
        bound = present.bound.get(worker.id)
        begun = decoding_requests(worker) - (bound.requests if bound is not None else 0)
        coming = coming_requests(present) if worker.role != "prefill" else 0.0
        return coming - max(0, begun) * min(1.0, after_s / self.life_s(worker, cluster, model))

    def bounded_s(self, request: Request, alone_s: float, beside_s: float) -> float:
        """Return the TPOT beside prompts, whose chunks are as short as the SLO requires."""
        if request.slo is None:
            return beside_s
        return max(alone_s, min(beside_s, PACE_RATIO * request.slo.tpot_s))
