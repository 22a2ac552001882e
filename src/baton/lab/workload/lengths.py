"""How long synthetic requests are, where every request is alike or nearly so. Richer ones: a workload file."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol

from baton.lab.workload.arrivals import Arrivals, draw_times_s
from baton.lab.workload.request import Trace, TraceRequest


class Lengths(Protocol):
    """A distribution of (input, output) tokens."""

    def draw(self, draw: Random) -> tuple[int, int]:
        """Input and output tokens of one request, both at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Every request alike: what varies in the result is the server."""

    input_tokens: int
    output_tokens: int

    def draw(self, draw: Random) -> tuple[int, int]:
        return self.input_tokens, self.output_tokens


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Lengths between two bounds, both included."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def draw(self, draw: Random) -> tuple[int, int]:
        return draw.randint(*self.input_tokens), draw.randint(*self.output_tokens)


def synthetic_trace(count: int, lengths: Lengths, arrivals: Arrivals, draw: Random) -> Trace:
    """Draw `count` requests that share nothing."""
    requests: list[TraceRequest] = []
    for at_s in draw_times_s(arrivals, count, draw):
        input_tokens, output_tokens = lengths.draw(draw)
        requests.append(TraceRequest(at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens))
    return Trace(format="synthetic", timing="absolute", requests=tuple(requests))
