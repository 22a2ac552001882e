"""The options of one run of `baton bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.lab.report.summary import SloTargets
from baton.lab.workload.arrivals import Arrivals
from baton.lab.workload.prompts import VOCAB_TOKENS

Endpoint = Literal["completions", "chat"]
PromptFormat = Literal["ids", "text"]


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace or workload file. Requests keep their lengths and prefixes, and their times unless paced otherwise."""

    path: Path
    limit: int | None
    rate_scale: float


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests of equal lengths that share no prefix."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are sent at their times, however slow the answers are."""

    rate_rps: float | None
    """Mean rate. None: the trace's rate. Ignored if all requests arrive at once."""
    arrivals: Arrivals
    """The arrival process, scaled to one request per second. `rate_rps` gives the real rate."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """This many clients; each sends its next request when its last one was answered."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """Requests are sent at the times of the trace."""


NO_TARGETS = SloTargets()

Pacing = OpenLoop | ClosedLoop | TraceTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The checked options of one run of `baton bench`."""

    url: str
    """Base URL of the API, with `/v1` or another prefix."""
    workload: TraceFile | Synthetic
    pacing: Pacing
    requests: int | None = None
    """Number of requests to send. None: the whole trace."""
    seed: int = 0
    warmup: int = 1
    slo: SloTargets = NO_TARGETS
    attainment_min: float = 0.9
    model: str | None = None
    """Name of the model. None: the first one that the server lists."""
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    prompt_format: PromptFormat | None = None
    """Format of prompts. None: token ids if the server accepts them, else text."""
    context_tokens: int | None = None
    vocab_tokens: int = VOCAB_TOKENS
    ignore_eos: bool = True
    timeout_s: float = 600.0
    """Time limit of one request, from sending to its last byte."""
    json: Path | None = None
    html: Path | None = None
