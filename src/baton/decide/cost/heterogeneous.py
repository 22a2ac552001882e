"""Cost model of a cluster with several kinds of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel
from baton.core.types import StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class HeterogeneousCost:
    """One cost model per kind of worker.

    Predictions without a kind use the first one; a handoff between unknown workers uses the slowest link.
    """

    kinds: Mapping[str, CostModel]
    """By `WorkerView.kind`. At least one."""

    @property
    def _first(self) -> CostModel:
        return next(iter(self.kinds.values()))

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        return self._first.prefill_s(new_tokens=new_tokens, cached_tokens=cached_tokens)

    def step_s(self, shape: StepShape) -> float:
        return self._first.step_s(shape)

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        return self._first.decode_run_s(requests=requests, context_tokens=context_tokens, steps=steps)

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        return max(cost.handoff_s(tokens=tokens, same_host=same_host) for cost in self.kinds.values())

    def on(self, kind: str) -> CostModel:
        return self.kinds.get(kind, self._first)
