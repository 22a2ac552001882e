"""What happened in a simulation: the life of every request, and everything that was said, in order."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from baton.core.messages import CloseRequest
from baton.core.types import Request, RequestId, WorkerId
from baton.decide.control.cluster import CoordinatorDecision, PoolDecision
from baton.decide.control.decision_log import Decision


@dataclass(slots=True, kw_only=True)
class Life:
    """One request as the server saw it."""

    request: Request
    tokens: array[int]
    """Prompt and the output so far: the server holds the truth about a request. An array: four bytes a token."""
    attempt: int = 0
    worker: WorkerId | None = None
    """The worker that has it. None: no worker yet, or its worker is lost and no other was found."""
    started_at_s: float | None = None
    """Start of the first step that computed a part of it."""
    leaves_first_token: bool = False
    """Some attempt left the first token to the decode worker."""
    handoffs_s: tuple[float, ...] = ()
    """When a worker was told to go on with it."""
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_logprobs: int = 0
    """Log probabilities of prompt tokens that came with the first token."""
    cached_tokens: int | None = None
    """Of the first grant."""
    closes: tuple[tuple[float, CloseRequest], ...] = ()

    @property
    def output(self) -> list[int]:
        return self.tokens[self.request.prompt_tokens :].tolist()


@dataclass(slots=True, kw_only=True)
class Journal:
    """Written by the simulated server, read by the checkers. Grows with the run: without `keep_log`, by lives only."""

    keep_log: bool
    tap: Callable[[Decision], None] | None = None
    """Takes every decision as it is made: for a log file, or a timeline."""
    lives: dict[RequestId, Life] = field(default_factory=dict[RequestId, Life])
    turns: list[Decision] = field(default_factory=list[Decision])
    """The decision log, with `keep_log`."""
    log: list[CoordinatorDecision | PoolDecision] = field(default_factory=list[CoordinatorDecision | PoolDecision])
    """Every event into the coordinator and the pools, with `keep_log`."""

    @property
    def steps(self) -> list[CoordinatorDecision | PoolDecision] | None:
        """Where the cluster notes its steps. None: nowhere."""
        return self.log if self.keep_log else None

    @property
    def is_logging(self) -> bool:
        """Tell whether decisions are to be made for the log."""
        return self.keep_log or self.tap is not None

    def log_decision(self, decision: Decision) -> None:
        if self.keep_log:
            self.turns.append(decision)
        if self.tap is not None:
            self.tap(decision)

    def decisions(self) -> list[CoordinatorDecision]:
        """Return what the coordinator has decided."""
        return [entry for entry in self.log if isinstance(entry, CoordinatorDecision)]

    def encoded(self) -> bytes:
        """Return the log as bytes: two runs are the same when these are (INV-6)."""
        return msgspec.msgpack.encode((self.turns, self.log))
