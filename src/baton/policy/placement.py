"""Placement: which worker decodes a request whose KV exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, StepShape, WorkerId, WorkerView


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
        """Choose among the candidates (never empty), the live workers that may decode.

        `source` is the host that holds the request's KV; None where no host does.
        """
        ...


@dataclass(frozen=True, slots=True)
class FastestStep:
    """Place the request where its next step is predicted shortest, the way of its KV there included."""

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        """See `PlacementPolicy.place`."""

        def key(worker: WorkerView) -> tuple[float, WorkerId]:
            shape = StepShape(
                decode_requests=worker.running_requests + 1,
                context_tokens=worker.context_tokens + request.prompt_tokens,
            )
            step_s = cost.on(worker.kind).step_s(shape)
            handoff_s = cost.handoff_s(tokens=request.prompt_tokens, same_host=source in (None, worker.host))
            return (step_s + handoff_s, worker.id)

        return min(candidates, key=key).id
