"""One request of a workload, read from a file or drawn from a distribution."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.core.types import Slo
from baton.lab.workload.rows import Count, Length, Time

Timing = Literal["absolute", "session", "none"]
"""Origin of `at_s`: the first request of the trace; the first request of the session; or no times (all zero)."""


class TraceRequest(Struct, frozen=True, kw_only=True, gc=False):
    """The arrival time, lengths and shared prefix of a request."""

    at_s: Time
    input_tokens: Length
    """Length of the prompt, at least 1."""
    output_tokens: Length
    """Length of the logged answer, at least 1. The load generator may request it; no policy sees it."""
    prefix_ids: tuple[int, ...] = ()
    """Ids of the prompt's leading blocks, in order. Equal leading ids mean an equal prefix. The last may be partial."""
    prefix_block_tokens: Count = 0
    """Tokens of one such block; 0 if the source has no prefixes."""
    tenant: str = ""
    client: int = 0
    """Number of the client, for the turns of clients on a server. 0: the tenant is the client."""
    session: str = ""
    turn: Count = 0
    """0 for the first request of a session."""
    priority: int = 0
    """Priority as the source logged it. Sources disagree on whether low or high values are served first."""
    slo: Slo | None = None
    """SLO of the request. None: the SLO of the whole run."""
    think_s: Time | None = None
    """Closed loop: the request arrives this long after the answer of its session's previous turn, but not before
    `at_s`. The prompt begins with that turn's prompt and answer; `input_tokens` counts them. None: at `at_s`."""


class Trace(Struct, frozen=True, kw_only=True):
    """The requests of one source, in its order."""

    format: str
    timing: Timing
    requests: tuple[TraceRequest, ...]
