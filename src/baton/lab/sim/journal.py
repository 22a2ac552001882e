"""The record of a simulation: the life of every request, and every event and decision in order."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from baton.core.messages import CloseRequest
from baton.core.types import Request, RequestId, WorkerId
from baton.decide.control.cluster_messages import CoordinatorDecision, PoolDecision
from baton.decide.control.decision_log import Decision


@dataclass(slots=True, kw_only=True)
class Life:
    """One request as the server saw it."""

    request: Request
    tokens: array[int]
    """Prompt and output so far. An array, because it needs only four bytes a token."""
    attempt: int = 0
    worker: WorkerId | None = None
    """The worker that holds the request. None: not assigned yet, or the worker was lost and no other was found."""
    started_at_s: float | None = None
    """Start of the first step that computed a part of the request."""
    leaves_first_token: bool = False
    """An attempt of the request left the first token to the decode worker."""
    handoffs_s: tuple[float, ...] = ()
    """Times at which a decode worker received the request."""
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_logprobs: int = 0
    """Number of log probabilities of prompt tokens that came with the first token."""
    cached_tokens: int | None = None
    """Cached tokens of the first grant of blocks."""
    closes: tuple[tuple[float, CloseRequest], ...] = ()

    @property
    def output(self) -> list[int]:
        return self.tokens[self.request.prompt_tokens :].tolist()


@dataclass(slots=True, kw_only=True)
class Journal:
    """The record of a run: the simulated server writes it, the checkers read it.

    It grows during the run. Without `keep_log` it holds `lives` only.
    """

    keep_log: bool
    tap: Callable[[Decision], None] | None = None
    """Receives every decision when it is made, for a log file or a timeline."""
    lives: dict[RequestId, Life] = field(default_factory=dict[RequestId, Life])
    turns: list[Decision] = field(default_factory=list[Decision])
    """The decision log. Empty without `keep_log`."""
    log: list[CoordinatorDecision | PoolDecision] = field(default_factory=list[CoordinatorDecision | PoolDecision])
    """Every event into the coordinator and the pools, with its decision. Empty without `keep_log`."""

    @property
    def steps(self) -> list[CoordinatorDecision | PoolDecision] | None:
        """The list that the cluster appends its decisions to. None: it records none."""
        return self.log if self.keep_log else None

    @property
    def is_logging(self) -> bool:
        """A consumer of decisions exists: the journal's log, or `tap`."""
        return self.keep_log or self.tap is not None

    def log_decision(self, decision: Decision) -> None:
        if self.keep_log:
            self.turns.append(decision)
        if self.tap is not None:
            self.tap(decision)

    def decisions(self) -> list[CoordinatorDecision]:
        """Return the coordinator's decisions, without those of pools."""
        return [entry for entry in self.log if isinstance(entry, CoordinatorDecision)]

    def encoded(self) -> bytes:
        """Return the log as bytes. Equal bytes mean that two runs were identical (INV-6)."""
        return msgspec.msgpack.encode((self.turns, self.log))
