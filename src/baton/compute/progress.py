"""How far the step under way has got: a word of memory, which the engine writes and any thread may read."""

from __future__ import annotations

import numpy as np


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
