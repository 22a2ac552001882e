"""The plans that `SloHeadroom` compares, one for each worker: for a prompt and for an answer, with their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from operator import attrgetter

from msgspec import Struct

from baton.core.types import ClusterView, HostId, Slo, WorkerId, WorkerView
from baton.decide.policy.answer_forecast import TpotForecast
from baton.decide.policy.predictions import PromptWork
from baton.decide.policy.weighing import Weighed

FOLLOWS_ROLES = "may not take it, because requests without an SLO follow the roles"
SENT_ELSEWHERE = "does not have its KV, which was sent ahead to another host"
_ROLE = attrgetter("role")
AnswerKey = tuple[bool, bool, float, bool, WorkerId]


class PromptPlan(Struct, frozen=True, gc=False):
    """A candidate worker for a prompt, with the predictions for it."""

    worker: WorkerView
    fetch: HostId | None
    queue_s: float
    """Time until the prompt is computed: earlier prompts, or a prefix that is loaded or fetched."""
    prompt_s: float
    ttft_s: float
    work: PromptWork
    slo: Slo
    """SLO of the request. Without one: the latencies that it would have on an idle worker."""
    beside_s: float
    """TPOT of the requests that decode there, with this prompt in chunks of full length. 0: none decodes."""
    bounded_s: float
    """The same with chunks as short as the SLO requires."""
    factor: float
    """Factor of the pressure, for decodes on the worker and a full arena."""
    pressure: float
    misses_slo: bool
    """True if the TTFT of this request or the TPOT of the requests that decode there would miss its SLO."""

    def weighed(self, rule: float, rule_term: str) -> Weighed:
        """Return the plan for `baton explain`.

        `rule`: first sort key, lower is better: a rule that ranks workers before their predicted times do. `rule_term`:
        the rule's effect on this worker, as text.
        """
        _, pressure, ttft_s, is_decode, _ = prompt_order(self)
        times = f", times {self.factor:.3g} because answers share the worker" if self.factor != 1.0 else ""
        return Weighed(
            worker=self.worker.id, wait_s=self.queue_s, own_s=self.prompt_s, predicted_s=ttft_s,
            key=(rule, float(self.misses_slo), pressure, ttft_s, float(is_decode)),
            terms=(
                rule_term,
                f"would miss an SLO ({self._tightest(self.bounded_s)})" if self.misses_slo else "meets every SLO",
                f"has a pressure of {pressure:.3g} ({self._tightest(self.beside_s)}{times})",
                f"has a TTFT of {_ms(ttft_s)}",
                f"is a {self.worker.role} worker",
            ),
        )  # fmt: skip

    def _tightest(self, tpot_s: float) -> str:
        """Describe the larger of both ratios of time to SLO."""
        if self.ttft_s * self.slo.tpot_s >= tpot_s * self.slo.ttft_s:
            return f"TTFT {_ms(self.ttft_s)} of {_ms(self.slo.ttft_s)}"
        return f"TPOT of the answers there {_ms(tpot_s)} of {_ms(self.slo.tpot_s)}"


def prompt_order(plan: PromptPlan) -> tuple[bool, float, float, bool, WorkerId]:
    """Return the sort key of a plan; the lowest is best."""
    worker = plan.worker
    return (plan.misses_slo, plan.pressure, plan.ttft_s, worker.role == "decode", worker.id)


def best_prompt_plan(
    plans: Sequence[PromptPlan], slo: Slo | None, answer_on: Callable[[WorkerView], TpotForecast]
) -> PromptPlan:
    """Return the best plan. A decode worker computes a prompt only if prompts are under more pressure than answers.

    Else prompts would settle on a decode worker that happens to be idle, and its answers on the other ones. `answer_on`
    predicts the answer on a worker.
    """
    best = min(plans, key=prompt_order)
    if slo is None or best.worker.role != "decode":
        return best
    own = min((plan for plan in plans if plan.worker.role != "decode"), key=prompt_order, default=best)
    if own.misses_slo:
        return best
    tpot_s = min(answer_on(plan.worker).load_s for plan in plans if plan.worker.role == "decode")
    return best if own.pressure > tpot_s / slo.tpot_s else own


def is_sent_ahead(candidates: Sequence[WorkerView], cluster: ClusterView) -> bool:
    """Return whether the KV was streamed ahead to one host: then only workers of that host are candidates."""
    if not cluster.is_sent_ahead or candidates[0].host != candidates[-1].host:
        return False
    roles = list(map(_ROLE, cluster.workers))
    return len(candidates) < roles.count("decode") + roles.count("mixed")


def weigh_by_phase(plans: Sequence[PromptPlan], chosen: WorkerId) -> list[Weighed]:
    """Return the plans of a request with an SLO, of which `best_prompt_plan` chose one."""
    if min(plans, key=prompt_order).worker.id == chosen:
        return [plan.weighed(0.0, "") for plan in plans]
    rules = {True: (1.0, "decodes, and answers are under more pressure than prompts"), False: (0.0, "computes prompts")}
    return [plan.weighed(*rules[plan.worker.role == "decode"]) for plan in plans]


def weigh_by_role(plans: Sequence[PromptPlan], offered: Set[WorkerId], pinned: WorkerId | None) -> list[Weighed]:
    """Return the plans of a request without an SLO. `pinned`: the worker beside its cached prefix, if it is chosen."""
    other = "computes prompts" if pinned is None else "has less of the prompt in its cache"
    rules = {True: (0.0, "has most of the prompt in its cache"), False: (1.0, other)}
    return [
        plan.weighed(*rules[plan.worker.id == pinned])
        if plan.worker.id in offered or plan.worker.id == pinned
        else plan.weighed(2.0, FOLLOWS_ROLES)
        for plan in plans
    ]


class AnswerPlan(Struct, frozen=True, gc=False):
    """A candidate worker for an answer, with the predictions for it."""

    worker: WorkerView
    is_full: bool
    """True if its arena has no room for the KV. A full batch counts by its TPOT, because decodes take turns."""
    tpot_s: float
    """Predicted TPOT of the answer there, with the handoff."""
    free_s: float
    """The same if prompts were computed in chunks of full length."""
    handoff_s: float
    """Handoff time per output token."""
    ttft_ratio: float
    """TTFT of the prompts that wait there / SLO. 0 without an SLO."""
    pressure: float
    misses_slo: bool

    def key(self) -> AnswerKey:
        """Return the sort key; the lowest is best."""
        worker = self.worker
        return (self.is_full, self.misses_slo, self.pressure, worker.role == "prefill", worker.id)

    def weighed(self, slo: Slo | None, *, unable: str, has_headroom: bool) -> Weighed:
        """Return the plan for `baton explain`.

        `unable`: why the worker is no candidate, or empty. `has_headroom`: a decode or mixed worker has headroom.
        """
        is_lent = self.worker.role == "prefill"
        lends = "is a prefill worker, which decodes only if no other worker has headroom"
        rule = 2.0 if unable else float(has_headroom and is_lent)
        rule_term = unable or (lends if is_lent else f"is a {self.worker.role} worker with headroom")
        pressure = f"{self.pressure:.3g}" if slo is not None else _ms(self.pressure)
        return Weighed(
            worker=self.worker.id, wait_s=self.handoff_s, own_s=self.tpot_s - self.handoff_s, predicted_s=self.tpot_s,
            key=(rule, *map(float, self.key()[:4])),
            terms=(
                rule_term,
                "has no room for its KV" if self.is_full else "has room for its KV",
                f"would miss an SLO ({self._tightest(slo, self.tpot_s)})" if self.misses_slo else "meets every SLO",
                f"has a pressure of {pressure} ({self._tightest(slo, self.free_s)})",
                f"is a {self.worker.role} worker",
            ),
        )  # fmt: skip

    def _tightest(self, slo: Slo | None, tpot_s: float) -> str:
        """Describe the larger of both ratios of time to SLO."""
        if slo is None:
            return f"TPOT {_ms(tpot_s)}"
        if self.ttft_ratio * slo.tpot_s > tpot_s:
            return f"TTFT of the prompts there {_ms(self.ttft_ratio * slo.ttft_s)} of {_ms(slo.ttft_s)}"
        return f"TPOT {_ms(tpot_s)} of {_ms(slo.tpot_s)}"


def _ms(time_s: float) -> str:
    time_ms = time_s * 1000
    return f"{time_ms:,.0f} ms" if time_ms >= 100 else f"{time_ms:.3g} ms"
