"""Draw how long each step of a simulated worker takes, from the distribution of its cost model."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, sqrt
from random import Random

from baton.decide.cost.noise import StepNoise


@dataclass(slots=True)
class HostSpeed:
    """The speed of a host, which all of its workers share: a logarithm that returns to 0 within `StepNoise.speed_s`."""

    draw: Random
    _at_s: float = 0.0
    _value: float | None = None
    """In standard deviations. None: not drawn yet."""

    def at(self, now_s: float, speed_s: float) -> float:
        """Return the speed in standard deviations. Times must not decrease."""
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
        """Return the time of a step that begins now."""
        noise = self.noise
        drawn_log = noise.speed_log * self.host.at(now_s, noise.speed_s) + self.draw.gauss(0.0, noise.step_log)
        drawn_log -= (noise.speed_log**2 + noise.step_log**2) / 2  # the mean of the exponential is 1
        taken_s = predicted_s * exp(drawn_log) * noise.usual_ratio
        if noise.stalls_per_s and self.draw.random() < noise.stalls_per_s * predicted_s:
            taken_s += self.draw.expovariate(1.0 / noise.stall_s) if noise.stall_s else 0.0
        return taken_s
