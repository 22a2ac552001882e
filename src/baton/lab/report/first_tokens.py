"""When the first token of a request came, as a decision log tells it: by one of three events, after who drew it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.messages import CloseRequest, DecodeBegun, PrefillFinished, RequestFinished, StartPrefill
from baton.core.types import RequestId
from baton.decide.control.decision_log import Decision


@dataclass(slots=True)
class FirstTokens:
    """Take every decision of a log, in order."""

    _left: set[RequestId] = field(default_factory=set[RequestId])
    """Requests whose prompts are computed by a worker that leaves the first token to another."""

    def take(self, decision: Decision) -> RequestId | None:
        """Say whose first token this event tells of, after a failover maybe not for the first time. None: nobody's."""
        told: RequestId | None = None
        match decision.event:
            case PrefillFinished(request_id=request_id) if request_id not in self._left:
                told = request_id
            case DecodeBegun(request_id=request_id) | RequestFinished(request_id=request_id, output_tokens=1):
                told = request_id
            case _:
                pass  # says nothing of a first token
        for command in decision.commands:
            if isinstance(command, StartPrefill) and command.until == "prompt":
                self._left.add(command.request.id)
            elif isinstance(command, StartPrefill):
                self._left.discard(command.request.id)
            elif isinstance(command, CloseRequest):
                self._left.discard(command.request_id)
        return told
