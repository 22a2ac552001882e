"""The port for engines of our own: one forward pass over paged KV."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from baton.core.step import Step, StepResult
from baton.decide.kv.layout import KVLayout


class Progress:
    """The number of layers that the current step has finished, in shared memory.

    The computing thread writes it between two layers; any other thread may read it during the step.
    """

    def __init__(self) -> None:
        self._word = np.zeros(1, dtype=np.int32)

    @property
    def layers(self) -> int:
        """The number of layers whose KV is complete for all tokens of the step."""
        return int(self._word[0])

    @layers.setter
    def layers(self, layers: int) -> None:
        self._word[0] = layers

    @property
    def address(self) -> int:
        """The address of the counter, an int32, for an engine that is not written in Python."""
        return self._word.ctypes.data


class StepEngine(Protocol):
    """Computes steps. It owns weights and scratch memory; the KV blocks belong to the host's arena.

    An engine keeps no state of requests: a step contains everything that the engine needs.
    """

    layout: KVLayout
    progress: Progress
    """The layers that the current step has finished. Reset its count to 0 before a step to observe that step."""

    def execute(self, step: Step) -> StepResult:
        """Compute every slice: write the KV of its new tokens into its blocks, and sample the next token if asked.

        Writes only to the slots of the slices' new tokens. The results are in the order of the slices.
        Raises StepMemoryError if the device has too little free memory for this step, DeviceError if it failed and
        the process must end.
        """
        ...

    def warm_up(self) -> None:
        """Run the code once before the first request, so that kernels are selected and memory is allocated.

        Touches no block of the arena.
        """
        ...
