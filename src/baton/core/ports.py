"""The port of cost models, shared by policies, planner and simulator."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from baton.core.types import StepShape


class CostModel(Protocol):
    """Predicts the duration of steps and handoffs."""

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        """Return the seconds to compute `new_tokens` of one prompt alone, after `cached_tokens` cached tokens."""
        ...

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds of one step."""
        ...

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        """Return the seconds of each of the next `steps` steps of a batch that only decodes.

        `context_tokens`: context of the first step; each later step reads `requests` tokens more. Every value equals
        `step_s` of that step's shape exactly, so the simulator can skip steps without changing its results.
        """
        ...

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        """Return the seconds to hand off a request of `tokens` tokens over an idle link.

        This is for two workers of one kind; `handoff_between_s` is for workers of different kinds.
        """
        ...

    def on(self, kind: str) -> CostModel:
        """Return the cost model for workers of this `WorkerView.kind`: the model itself if all workers are alike."""
        ...


def handoff_between_s(cost: CostModel, kinds: Collection[str], *, tokens: int, same_host: bool) -> float:
    """Return the seconds of a handoff between workers of these kinds (`WorkerView.kind`): the slower end decides.

    If `kinds` is empty, for example because the workers have left: the cost model's value for two workers of one kind.
    """
    if not kinds:
        return cost.handoff_s(tokens=tokens, same_host=same_host)
    return max(cost.on(kind).handoff_s(tokens=tokens, same_host=same_host) for kind in kinds)
