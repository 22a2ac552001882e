"""Builds the report of a batcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.messages import BatcherEvent, StepReport
from baton.core.step import SliceResult
from baton.core.types import OutputToken, RequestId, WorkerView
from baton.decide.control.lane import Lane


@dataclass(slots=True)
class ReportBuilder:
    """Collects events and tokens of commands and steps, and returns them as one message."""

    tokens: list[OutputToken] = field(default_factory=list[OutputToken])
    events: list[BatcherEvent] = field(default_factory=list[BatcherEvent])
    started: list[RequestId] = field(default_factory=list[RequestId])
    is_load_new: bool = False
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def start(self, lane: Lane) -> None:
        """Report that a lane is in its first step. For a lane with output tokens, its next token shows that instead."""
        if not lane.started:
            lane.started = True
            if not lane.output_tokens:
                self.started.append(lane.request.id)

    def draw(self, lane: Lane, outcome: SliceResult) -> None:
        """Add the token that a lane has sampled."""
        assert outcome.token is not None, f"{lane.request.id} has sampled no token"
        request_id, index = lane.request.id, lane.output_tokens - 1
        prompt_logprobs = lane.prompt_logprobs if index == 0 else ()
        self.tokens.append(
            OutputToken(
                request_id, lane.attempt, index, outcome.token, outcome.logprob, prompt_logprobs, outcome.embedding
            )
        )

    def take(self, view: WorkerView, step_s: float) -> StepReport:
        """Return the report and start a new one. `view`: the current load."""
        report = StepReport(
            worker=view.id,
            tokens=tuple(self.tokens),
            events=tuple(self.events),
            view=view,
            step_s=step_s,
            started=tuple(self.started),
            is_load_new=self.is_load_new or bool(self.started),
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
        self.tokens.clear()
        self.events.clear()
        self.started.clear()
        self.is_load_new, self.drafted_tokens, self.accepted_tokens = False, 0, 0
        return report
