"""The order of the requests in a batcher: by the fairness policy, and after an overload new requests first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, nextafter

from baton.core.ports import CostModel
from baton.core.types import Request
from baton.decide.control.lane import Lane
from baton.decide.policy.fairness import BacklogOrder, FairnessPolicy


@dataclass(slots=True)
class LaneOrder:
    """Gives each request of a worker a sort key, which never changes."""

    fairness: FairnessPolicy
    _newest_s: float = -inf
    """Arrival of the newest request so far."""
    _backlog: BacklogOrder | None = field(init=False)
    """The fairness policy, if it lets new requests overtake a backlog. Kept: `isinstance` of a protocol is slow."""

    def __post_init__(self) -> None:
        self._backlog = self.fairness if isinstance(self.fairness, BacklogOrder) else None

    def key(self, request: Request, lanes: Iterable[Lane], cost: CostModel) -> tuple[float, ...]:
        """Return a new request's sort key: by its turn in a fair queue, else before a backlog or by policy.

        `lanes`: the present requests of the worker.
        """
        gap_s = request.arrived_at_s - self._newest_s
        self._newest_s = max(self._newest_s, request.arrived_at_s)
        if request.turn:
            return (float(request.turn_key),)
        key = self.fairness.key(request)
        if gap_s > 0 and self._backlog is not None:
            backlog = [lane for lane in lanes if _is_overtaken(lane, request)]
            if backlog:
                oldest_wait_s = request.arrived_at_s - min(lane.request.arrived_at_s for lane in backlog)
                prompt_s = cost.prefill_s(new_tokens=request.prompt_tokens, cached_tokens=0)
                if self._backlog.overtakes(request, gap_s=gap_s, oldest_wait_s=oldest_wait_s, prompt_s=prompt_s):
                    first = min(lane.key for lane in backlog)
                    return (*first[:-1], nextafter(first[-1], -inf))
        return key


def _is_overtaken(lane: Lane, request: Request) -> bool:
    """Return whether a lane waits for its first step, and the new request may go before it."""
    other = lane.request
    return not (lane.started or other.turn or other.slo or lane.output_tokens) and other.priority == request.priority
