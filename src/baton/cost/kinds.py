"""One cost model for a cluster whose workers are not all alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel
from baton.core.types import StepShape


@dataclass(frozen=True, slots=True)
class CostByKind:
    """The models of the kinds that a cluster has. What is asked without a kind is answered by `usual`."""

    usual: CostModel
    kinds: Mapping[str, CostModel]

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        """See `CostModel.prefill_s`."""
        return self.usual.prefill_s(new_tokens=new_tokens, cached_tokens=cached_tokens)

    def step_s(self, shape: StepShape) -> float:
        """See `CostModel.step_s`."""
        return self.usual.step_s(shape)

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        """See `CostModel.decode_run_s`."""
        return self.usual.decode_run_s(requests=requests, context_tokens=context_tokens, steps=steps)

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        """See `CostModel.handoff_s`."""
        return self.usual.handoff_s(tokens=tokens, same_host=same_host)

    def on(self, kind: str) -> CostModel:
        """See `CostModel.on`. A kind that is not known costs what is usual."""
        return self.kinds.get(kind, self.usual)
