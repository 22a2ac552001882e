"""What happened in a simulation: the life of every request, and everything that was said, in order."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from baton.core.messages import CloseRequest
from baton.core.types import Request, RequestId, WorkerId
from baton.decide.control.decision_log import Decision, PoolDecision


@dataclass(slots=True, kw_only=True)
class Life:
    """One request as the server saw it."""

    request: Request
    tokens: array[int]
    """Prompt and the output so far: the server holds the truth about a request. An array: four bytes a token."""
    attempt: int = 0
    worker: WorkerId | None = None
    """Who has it. None: nobody yet, or its worker is lost and no other has been found."""
    started_at_s: float | None = None
    """Start of the first step that computed a part of it."""
    leaves_first_token: bool = False
    """Some attempt left the first token to whoever decodes."""
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
    tap: Callable[[Decision | PoolDecision], None] | None = None
    """Told every decision as it is made, instead of keeping it: for a log file, or a timeline."""
    lives: dict[RequestId, Life] = field(default_factory=dict[RequestId, Life])
    log: list[Decision | PoolDecision] = field(default_factory=list[Decision | PoolDecision])

    @property
    def sink(self) -> Callable[[Decision | PoolDecision], None] | None:
        """Where decisions go. None: nobody wants them, and they need not be made."""
        if self.tap is not None:
            return self.tap
        return self.log.append if self.keep_log else None

    def decisions(self) -> list[Decision]:
        return [entry for entry in self.log if isinstance(entry, Decision)]

    def encoded(self) -> bytes:
        """The log as bytes: two runs are the same when these are (INV-6)."""
        return msgspec.msgpack.encode(self.log)
