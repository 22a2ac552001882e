"""How long a tier takes to read, learned from the reads that were made."""

from __future__ import annotations

from dataclasses import dataclass, field

KEEP_RATIO = 0.9
"""What a read weighs after the next one: the last ten or so make the estimate."""
DOUBT_RATIO = 0.98
"""What all reads weigh after one that was not made because of them: who never reads again never learns better."""
_GIVEN_WEIGHT = 0.001
"""Of each of the two readings that stand for what was given, against 1 of one that was made."""
_GIVEN_BLOCKS = (1, 64)


@dataclass(slots=True)
class _Sums:
    """Weighted sums of a line fit: of 1, n, n * n, t and n * t."""

    one: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    t: float = 0.0
    nt: float = 0.0

    def add(self, n: float, t: float, weight: float) -> None:
        self.one += weight
        self.n += weight * n
        self.nn += weight * n * n
        self.t += weight * t
        self.nt += weight * n * t

    def scale(self, ratio: float) -> None:
        self.one, self.n, self.nn = self.one * ratio, self.n * ratio, self.nn * ratio
        self.t, self.nt = self.t * ratio, self.nt * ratio


@dataclass(slots=True)
class TierSpeed:
    """A line through (blocks, seconds): latency, and what each block adds. Blocks that are read before count as blocks.

    Fitted by least squares of relative deviations, with weights that decay. It begins as what was given, which goes on
    to count a little: two points make a line even where all reads are of one size.
    """

    latency_s: float
    """From asking for a block to its first byte."""
    block_s: float
    """What each block adds."""
    _given: _Sums = field(default_factory=_Sums)
    _made: _Sums = field(default_factory=_Sums)

    def __post_init__(self) -> None:
        for blocks in _GIVEN_BLOCKS:
            self._given.add(blocks, self.load_s(blocks), _GIVEN_WEIGHT / blocks**2)

    def load_s(self, blocks: int) -> float:
        """Predict how long it takes until the last of so many blocks is there."""
        return self.latency_s + blocks * self.block_s

    def learn(self, blocks: int, took_s: float) -> None:
        """Note a read: how many blocks were behind it and in it, and how long it took."""
        self._made.scale(KEEP_RATIO)
        self._made.add(blocks, took_s, 1.0 / blocks**2)
        self._fit()

    def doubt(self) -> None:
        """Note that a read was not made because it would take so long: believe a little less that it would."""
        self._made.scale(DOUBT_RATIO)
        self._fit()

    def _fit(self) -> None:
        given, made = self._given, self._made
        one, n, nn = given.one + made.one, given.n + made.n, given.nn + made.nn
        t, nt = given.t + made.t, given.nt + made.nt
        spread = one * nn - n * n
        self.block_s = (one * nt - n * t) / spread
        self.latency_s = (t - n * self.block_s) / one
        if self.block_s < 0.0:
            self.block_s, self.latency_s = 0.0, t / one
        elif self.latency_s < 0.0:
            self.block_s, self.latency_s = nt / nn, 0.0
