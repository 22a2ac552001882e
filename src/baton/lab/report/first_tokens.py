"""Find the time of each request's first token in a decision log. Any of three events reports it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.messages import CloseRequest, DecodeBegun, PrefillFinished, RequestFinished, StartPrefill
from baton.core.types import RequestId
from baton.decide.control.decision_log import Decision, coordinator_events


@dataclass(slots=True)
class FirstTokens:
    """Finds first tokens. `take` expects every decision of a log, in order."""

    _left: set[RequestId] = field(default_factory=set[RequestId])
    """Requests whose prefill worker leaves the first token to the decode worker."""

    def take(self, decision: Decision) -> list[RequestId]:
        """Return the requests whose first token this decision reports. A failover may report a request again."""
        told: list[RequestId] = []
        for event in coordinator_events(decision.event):
            match event:
                case PrefillFinished(request_id=request_id) if request_id not in self._left:
                    told.append(request_id)
                case DecodeBegun(request_id=request_id) | RequestFinished(request_id=request_id, output_tokens=1):
                    told.append(request_id)
                case _:
                    pass  # other events report no first token
        for command in decision.commands:
            if isinstance(command, StartPrefill) and command.until == "prompt":
                self._left.add(command.request.id)
            elif isinstance(command, StartPrefill):
                self._left.discard(command.request.id)
            elif isinstance(command, CloseRequest):
                self._left.discard(command.request_id)
        return told
