"""Ports that policies, the planner and the simulator share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from baton.core.types import StepShape


class CostModel(Protocol):
    """Predict how long things take. One model for policies, planner and simulator."""

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        """Seconds to compute `new_tokens` of one prompt, alone, after `cached_tokens` that need no work."""
        ...

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one forward pass."""
        ...

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        """Seconds of each of the next steps of a batch that only decodes.

        `context_tokens` is what the first of them reads; each later one reads `requests` tokens more. Every value is
        exactly `step_s` of that step's shape, so that a simulation may jump over steps without a difference.
        """
        ...

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        """Seconds until another worker can go on with a request of `tokens` tokens, nothing else on the wire.

        Of a worker alone, or of workers that are alike: `handoff_between_s` knows two ends.
        """
        ...

    def on(self, kind: str) -> CostModel:
        """Return the model of a worker's hardware, by `WorkerView.kind`. Where all are alike: this one."""
        ...


def handoff_between_s(cost: CostModel, kinds: Collection[str], *, tokens: int, same_host: bool) -> float:
    """Seconds of a handoff between workers of these kinds (`WorkerView.kind`): at the wire of the slower end.

    Without kinds, as where the source's workers are gone: what the cost model says of a handoff between any two.
    """
    if not kinds:
        return cost.handoff_s(tokens=tokens, same_host=same_host)
    return max(cost.on(kind).handoff_s(tokens=tokens, same_host=same_host) for kind in kinds)
