"""The port that an engine of our own fills: one forward pass over paged KV."""

from __future__ import annotations

from typing import Protocol

from baton.compute.progress import Progress
from baton.core.step import Step, StepResult
from baton.decide.kv.layout import KVLayout


class StepEngine(Protocol):
    """Computes steps. It owns weights and scratch memory; the KV blocks belong to the host's arena, which it is given.

    It keeps no state about requests: everything that a step needs is in the step and in the blocks that it names.
    """

    layout: KVLayout
    progress: Progress
    """Counts up to all layers in each step, as they are done. Whoever watches a step sets it to 0 before."""

    def execute(self, step: Step) -> StepResult:
        """Compute every slice: write the KV of its new tokens into its blocks, draw the next token where asked.

        Writes no byte outside of the slots of the slices' new tokens. Results stand in the order of the slices.
        """
        ...

    def warm_up(self) -> None:
        """Pay once, before the first request, for what first use costs (kernel selection, memory). Touches no block."""
        ...
