"""The port for engines of our own: one forward pass over paged KV."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from baton.core.step import Step, StepResult
from baton.decide.kv.layout import KVLayout


class Progress:
    """Written by the thread that computes, between two layers, and read while that is inside of one."""

    def __init__(self) -> None:
        self._word = np.zeros(1, dtype=np.int32)

    @property
    def layers(self) -> int:
        """Layers of the step whose KV is complete, for all of its tokens."""
        return int(self._word[0])

    @layers.setter
    def layers(self, layers: int) -> None:
        self._word[0] = layers

    @property
    def address(self) -> int:
        """Of the word, an int32: for an engine that is not written in Python."""
        return self._word.ctypes.data


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
