"""Draw how long each step of a simulated worker takes, from the distribution of its cost model."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, sqrt
from random import Random

from baton.decide.cost.noise import StepNoise


@dataclass(slots=True)
class HostSpeed:
    """The slow factor of a host's step times, which its workers share: an Ornstein-Uhlenbeck process of the logarithm.

    A positive value makes steps longer. The value returns towards 0 within about `StepNoise.speed_s`.
    """

    draw: Random
    _at_s: float = 0.0
    _value: float | None = None
    """In standard deviations. None: not drawn yet."""

    def at(self, now_s: float, speed_s: float) -> float:
        """Return the logarithm of the slow factor in standard deviations. `now_s` must not decrease between calls."""
        if self._value is None:
            self._value = self.draw.gauss(0.0, 1.0)
        elif now_s > self._at_s:
            kept = exp((self._at_s - now_s) / speed_s) if speed_s > 0.0 else 0.0
            self._value = kept * self._value + sqrt(1.0 - kept * kept) * self.draw.gauss(0.0, 1.0)
        self._at_s = now_s
        return self._value


@dataclass(frozen=True, slots=True)
class StepDraws:
    """Draws the step times of one worker process."""

    noise: StepNoise
    host: HostSpeed
    draw: Random = field(default_factory=Random)

    def taken_s(self, predicted_s: float, now_s: float) -> float:
        """Return the seconds that a step takes if it begins at `now_s`."""
        noise = self.noise
        drawn_log = noise.speed_sigma * self.host.at(now_s, noise.speed_s) + self.draw.gauss(0.0, noise.step_sigma)
        drawn_log -= (noise.speed_sigma**2 + noise.step_sigma**2) / 2  # so that the mean of its exponential is 1
        taken_s = predicted_s * exp(drawn_log) * noise.usual_ratio
        if noise.stalls_per_s and self.draw.random() < noise.stalls_per_s * predicted_s:
            taken_s += self.draw.expovariate(1.0 / noise.stall_s) if noise.stall_s else 0.0
        return taken_s
