"""The waiting room: admitted requests without a worker, and when they entered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.core.messages import CloseRequest
from baton.core.types import RequestId

_ROUNDING_S = 1e-6
"""Float tolerance, so that the deadline timer sees the first request as overdue."""


@dataclass(slots=True)
class WaitingRoom:
    """Admitted requests that wait for a worker, the oldest first. Admission bounds their number."""

    _since_s: dict[RequestId, float] = field(default_factory=dict[RequestId, float])

    def __len__(self) -> int:
        return len(self._since_s)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._since_s)

    @property
    def since_s(self) -> float | None:
        """Time when the oldest request entered. None: no request waits."""
        return next(iter(self._since_s.values()), None)

    def enter(self, request_id: RequestId, now_s: float) -> None:
        self._since_s[request_id] = now_s

    def leave(self, request_id: RequestId) -> None:
        """Remove a request. Does nothing if it does not wait."""
        self._since_s.pop(request_id, None)

    def clear(self) -> None:
        """Remove all requests."""
        self._since_s.clear()

    def reject_overdue(self, wait_s: float, now_s: float) -> list[CloseRequest]:
        """Return the rejections of the requests that have waited at least `wait_s`, the oldest first.

        Their clients can then use another server. The requests stay here until they end.
        """
        limit_s = now_s - wait_s + _ROUNDING_S
        overdue = [request_id for request_id, since_s in self._since_s.items() if since_s <= limit_s]
        why = f"no worker was available for {wait_s:g} s; send the request again later, or raise survival.wait_s"
        return [CloseRequest(request_id, "rejected", why, "no_worker") for request_id in overdue]
