"""Prediction of a tier's read time, fitted to measured reads."""

from __future__ import annotations

from dataclasses import dataclass, field

KEEP_RATIO = 0.9
"""Decay of a read's weight per later read: about the last ten reads determine the estimate."""
DOUBT_RATIO = 0.98
"""Decay per read that was skipped as too slow. Without it a tier that was slow once would never be retried."""
_GIVEN_WEIGHT = 0.001
"""Weight of each of the two points that represent the configured speed. A measured read has weight 1."""
_GIVEN_BLOCKS = (1, 64)


@dataclass(slots=True)
class _Sums:
    """Weighted sums of a linear fit: of 1, n, n * n, t and n * t."""

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
    """A line through (blocks, seconds), where blocks includes those queued before the read.

    Fitted by least squares of relative errors with decaying weights. It starts with the configured speed, which keeps a
    small weight: its two points determine a line even if all reads have one size.
    """

    latency_s: float
    """Time to the first byte."""
    block_s: float
    """Time per block."""
    _given: _Sums = field(default_factory=_Sums)
    _made: _Sums = field(default_factory=_Sums)

    def __post_init__(self) -> None:
        for blocks in _GIVEN_BLOCKS:
            self._given.add(blocks, self.load_s(blocks), _GIVEN_WEIGHT / blocks**2)

    def load_s(self, blocks: int) -> float:
        """Predict the time until the last of this many blocks is read."""
        return self.latency_s + blocks * self.block_s

    def learn(self, blocks: int, took_s: float) -> None:
        """Record a read: its blocks, including those queued before it, and its duration."""
        self._made.scale(KEEP_RATIO)
        self._made.add(blocks, took_s, 1.0 / blocks**2)
        self._fit()

    def doubt(self) -> None:
        """Record a read that was skipped as too slow: reduce the weight of the measured reads slightly."""
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
