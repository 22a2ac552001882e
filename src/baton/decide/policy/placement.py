"""Placement: choose the worker that decodes a request after its prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.ports import CostModel, handoff_between_s
from baton.core.report_parts import StepPrices
from baton.core.types import ClusterView, HostId, Request, StepShape, WorkerId, WorkerView
from baton.decide.cost.online import cost_of


@runtime_checkable
class PlacementPolicy(Protocol):
    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        """Choose one of the candidates: the live workers that may decode. The list is never empty.

        `source`: the host that holds the KV of the request. None: no host holds it.
        """
        ...


@dataclass(frozen=True, slots=True)
class FastestStep:
    """Place the request on the worker with the lowest predicted handoff time plus next step."""

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        sources = cluster.kinds_on(source)
        predicted_s: dict[tuple[str, StepPrices | None, int, int, bool], float] = {}  # idle workers share one entry

        def key(worker: WorkerView) -> tuple[float, WorkerId]:
            same_host = source is None or source == worker.host
            alike = (worker.kind, worker.prices, worker.running_requests, worker.context_tokens, same_host)
            if alike not in predicted_s:
                shape = StepShape(
                    decode_requests=worker.running_requests + 1,
                    context_tokens=worker.context_tokens + request.prompt_tokens,
                )
                step_s = cost_of(worker, cost).step_s(shape)
                handoff_s = handoff_between_s(
                    cost, {*sources, worker.kind}, tokens=request.prompt_tokens, same_host=same_host
                )
                predicted_s[alike] = step_s + handoff_s
            return (predicted_s[alike], worker.id)

        return min(candidates, key=key).id
