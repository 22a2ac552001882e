"""Constrained decoding: make the outputs of any engine match the grammars of their requests.

Sandboxes compute the token masks of a step during its forward pass, because they only depend on earlier tokens.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.compute.mask_sandboxes import MaskSandboxes
from baton.compute.models.card import ModelCard
from baton.compute.step_engine import StepEngine
from baton.core.config import SandboxConfig
from baton.core.step import Step, StepResult


class ConstrainedEngine:
    """Implements `StepEngine` around another engine, and limits the tokens that it may sample for each slice."""

    def __init__(self, inner: StepEngine, card: ModelCard, limits: SandboxConfig) -> None:
        self.layout = inner.layout
        self.progress = inner.progress
        self._inner = inner
        self._masks = MaskSandboxes(card, limits)

    def warm_up(self) -> None:
        self._inner.warm_up()

    def execute(self, step: Step) -> StepResult:
        """Compute a step. A slice with an invalid grammar fails alone; a slice whose masks are late gets no token."""
        constrained = [
            index for index, part in enumerate(step.slices) if part.sample and part.sampling.grammar is not None
        ]
        if not constrained:
            return self._inner.execute(step)
        masks = self._masks.begin([step.slices[index] for index in constrained])
        slices = list(step.slices)
        for index, allowed in zip(constrained, masks, strict=True):
            slices[index] = replace(slices[index], allowed=allowed)
        results = list(self._inner.execute(Step(tuple(slices))).slices)
        for index, allowed in zip(constrained, masks, strict=True):
            if allowed.failure:
                results[index] = replace(results[index], failure=allowed.failure)
        return StepResult(tuple(results))
