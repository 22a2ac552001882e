"""What one run of `baton bench` does."""

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
    """Lengths, prefixes and (unless paced otherwise) times from a file."""

    path: Path
    limit: int | None
    rate_scale: float


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Every request alike, sharing nothing."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come when they come, however slow the answers are."""

    rate_rps: float | None
    """Mean. None: that of the trace; of those who come at once, there is none."""
    arrivals: Arrivals
    """The process, at one request a second."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """This many clients, each sending its next request when the last one was answered."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """As in the trace."""


NO_TARGETS = SloTargets()

Pacing = OpenLoop | ClosedLoop | TraceTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One run. Lengths in tokens."""

    url: str
    """Base of the API, `/v1` (or another prefix) included."""
    workload: TraceFile | Synthetic
    pacing: Pacing
    requests: int | None = None
    """How many are sent. None: the whole trace."""
    seed: int = 0
    warmup: int = 1
    slo: SloTargets = NO_TARGETS
    attainment_min: float = 0.9
    model: str | None = None
    """None: the first that the server lists."""
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    prompt_format: PromptFormat | None = None
    """None: ids where the server takes them."""
    context_tokens: int | None = None
    vocab_tokens: int = VOCAB_TOKENS
    ignore_eos: bool = True
    timeout_s: float = 600.0
    """Of one request, from sending to its last byte."""
    json: Path | None = None
    html: Path | None = None
