"""Splits of workers between prefill and decode, and the share of the targets that a load takes on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from msgspec import Struct

from baton.core.ports import CostModel
from baton.core.types import Slo, StepShape, WorkerView
from baton.decide.policy.demand import WorkersNeeded
from baton.decide.policy.forecast import LoadRates

BUSY_RATIO_MAX = 0.9
"""Utilization of a role above which its queue is expected to grow."""
MIXING_RATIO = 0.9
"""TPOT / TPOT target of a worker that decodes beside prompts: `slo-chunked` fills its steps up to this share."""
_LENT_CAPACITY_MIN = 0.1
"""Minimum share of a mixed worker that is left for the second phase, so that predictions stay finite."""
_SHARE_MIN = 0.05
"""Minimum share of a mixed worker's time for one phase, so that predictions stay finite."""


class Split(Struct, frozen=True, array_like=True):
    """Workers of each phase, and those that serve both: the last worker of a phase, or all of them."""

    prefill: int
    decode: int
    mixed: int = 0

    @property
    def is_mixed(self) -> bool:
        """Whether no worker has one phase only."""
        return not (self.prefill or self.decode)

    def __str__(self) -> str:
        parts = (f"{self.prefill}P" if self.prefill else "", f"{self.mixed}M" if self.mixed else "")
        return "".join((*parts, f"{self.decode}D" if self.decode else ""))


class Pressure(Struct, frozen=True, kw_only=True):
    """Predicted shares of the targets with one split. Above 1: the target is missed."""

    ttft_ratio: float
    tpot_ratio: float
    busy_ratio: float
    """Utilization of the busier phase by recent arrivals / `BUSY_RATIO_MAX`."""

    @property
    def most(self) -> float:
        return max(self.ttft_ratio, self.tpot_ratio, self.busy_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLoad:
    """The load of the workers that prefill or decode, and the targets of its requests."""

    decode_model: CostModel
    requests_max: int
    """Maximum requests in a step of a decode worker. 0: unknown."""
    slo: Slo
    queue_s: float
    """Seconds that one worker needs for all queued prompts."""
    prompt_s: float
    """Seconds of a prompt of the mean length."""
    chunk_s: float
    """Seconds of the largest part of such a prompt that is computed in one step."""
    output_tokens: float
    """Mean length of an answer."""
    decoding: int
    """Requests that decode, or will as soon as their prompts are computed."""
    waiting: int
    """Those of them that no worker has yet: they will not all decode at once."""
    context_tokens: int
    needed: WorkersNeeded
    """Workers that the recent arrivals keep busy."""
    links: float = 0.0
    """Workers whose links the handoffs keep busy, in each phase. 0: all workers are on one host."""

    def pressure(self, split: Split) -> Pressure:
        """Predict TTFT / SLO, TPOT / SLO, and the utilization by the recent arrivals."""
        if split.is_mixed:
            return self._mixed_pressure(split.mixed)
        prefill, decode = self._capacities(split)
        slow = self._tpot_ratio(decode)
        if split.mixed and (self.decoding or self.needed.decode):
            slow = max(slow, MIXING_RATIO)
        busy = max(max(self.needed.prefill, self.links) / prefill, max(self.needed.decode, self.links) / decode)
        late = (self.queue_s / prefill + self.prompt_s) / self.slo.ttft_s
        return Pressure(ttft_ratio=late, tpot_ratio=slow, busy_ratio=busy / BUSY_RATIO_MAX)

    def _mixed_pressure(self, workers: int) -> Pressure:
        """Predict the shares of the targets if every worker serves both phases, so that nothing is handed off.

        Each phase has the time that the other one leaves. An answer also waits for a chunk that runs when it begins.
        """
        prompts_ratio, answers_ratio = self.needed.prefill / workers, self.needed.decode / workers
        late = self.queue_s / workers + self.prompt_s / max(_SHARE_MIN, 1.0 - answers_ratio)
        slow = self._tpot_ratio(workers) / max(_SHARE_MIN, 1.0 - prompts_ratio)
        chunk_ratio = self.chunk_s / max(1.0, self.output_tokens - 1.0) / self.slo.tpot_s
        return Pressure(
            ttft_ratio=late / self.slo.ttft_s,
            tpot_ratio=slow + chunk_ratio if self.decoding or answers_ratio else 0.0,
            busy_ratio=(prompts_ratio + answers_ratio) / BUSY_RATIO_MAX,
        )

    def _capacities(self, split: Split) -> tuple[float, float]:
        """Return each phase's capacity in workers. A mixed one counts fully in its own phase, partly in the other."""
        if not split.mixed:
            return split.prefill, split.decode
        if not split.decode:
            started = max(0, self.decoding - self.waiting)
            own = max(self.needed.decode, self._tpot_ratio(1, started) / MIXING_RATIO if started else 0.0)
            return split.prefill + max(_LENT_CAPACITY_MIN, 1.0 - own), 1.0
        return 1.0, split.decode + max(_LENT_CAPACITY_MIN, 1.0 - self.needed.prefill)

    def _tpot_ratio(self, decode: float, requests: int | None = None) -> float:
        """Predict TPOT / SLO on this number of decode workers. Requests beyond the batch limit take turns.

        `requests`: None takes all that decode or soon will.
        """
        each = max(1, ceil((self.decoding if requests is None else requests) / decode))
        batch = min(each, self.requests_max or each)
        turns = each / batch
        shape = StepShape(decode_requests=batch, context_tokens=int(self.context_tokens / decode / turns))
        return turns * self.decode_model.step_s(shape) / self.slo.tpot_s


def busy_links(demand: LoadRates, workers: Sequence[WorkerView], cost: CostModel) -> float:
    """Return the number of workers whose links are busy with handoffs: each leaves one host and enters another.

    Workers of one host share its link.
    """
    hosts = len({worker.host for worker in workers})
    if hosts < 2:
        return 0.0
    handoff_s = cost.handoff_s(tokens=round(demand.prompt_tokens), same_host=False)
    return demand.requests_rps * handoff_s * len(workers) / hosts
