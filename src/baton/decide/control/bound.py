"""Requests that are bound to a decode worker before they decode: their KV goes there while their prompts are computed.

Between the binding and the first decode step lie the wait and the prompt, seconds under load. A worker's load of this
moment does not include them: a choice by load alone would bind all requests of that time to one idle worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.types import BoundLoad, Request, RequestId, WorkerId


@dataclass(slots=True)
class Bound:
    """The decode workers that requests are bound to. At most one entry per live request."""

    loads: dict[WorkerId, BoundLoad] = field(default_factory=dict[WorkerId, BoundLoad])
    """By worker; those without any are left out. Replaced when it changes, so that views given out stay as they are."""
    _of: dict[RequestId, tuple[WorkerId, int]] = field(default_factory=dict[RequestId, tuple[WorkerId, int]])
    """The worker, and the tokens of the prompt."""

    def bind(self, request: Request, worker: WorkerId) -> None:
        """Note where a request will decode, instead of where it would have."""
        self.release(request.id)
        self._of[request.id] = worker, request.prompt_tokens
        self._add(worker, 1, request.prompt_tokens)

    def release(self, request_id: RequestId) -> None:
        """Forget it: the request decodes now, has ended, or starts anew. Nothing where it is not bound."""
        if request_id in self._of:
            worker, tokens = self._of.pop(request_id)
            self._add(worker, -1, -tokens)

    def _add(self, worker: WorkerId, requests: int, tokens: int) -> None:
        before = self.loads.get(worker, BoundLoad(0, 0))
        after = BoundLoad(before.requests + requests, before.tokens + tokens)
        others = {name: load for name, load in self.loads.items() if name != worker}
        self.loads = {**others, worker: after} if after.requests else others
