"""One request of a workload, whatever file or distribution it came from."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.core.types import Slo

Timing = Literal["absolute", "session", "none"]
"""What `at_s` counts from: the first request of the trace; the first call of its session; or nothing (all zero)."""


class TraceRequest(Struct, frozen=True, kw_only=True, gc=False):
    """When a request arrives, how long it is, and what it shares with others."""

    at_s: float
    input_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1: how long the answer was. A driver may ask for it; no policy sees it."""
    prefix_ids: tuple[int, ...] = ()
    """Names of the input's leading blocks, in order. Equal leading ids: equal prefix. The last may be partial."""
    prefix_block_tokens: int = 0
    """Tokens of one such block; 0 where the source knows no prefixes."""
    tenant: str = ""
    session: str = ""
    turn: int = 0
    """0 for the first request of a session."""
    priority: int = 0
    """As the source logged it; sources do not agree on whether low or high comes first."""
    slo: Slo | None = None
    """What this request was promised. None: what the whole run is."""
    think_s: float | None = None
    """Closed loop: it comes this long after the answer of its session's turn before, whose prompt and answer its own
    prompt begins with (`input_tokens` counts both). `at_s` is then the earliest time. None: it comes at `at_s`."""


class Trace(Struct, frozen=True, kw_only=True):
    """The requests of one file, in its order."""

    format: str
    timing: Timing
    requests: tuple[TraceRequest, ...]
