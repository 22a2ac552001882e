"""Compare the predicted TTFT and TPOT of the requests of a log with the actual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from baton.core.messages import CloseRequest, RequestFinished, StartPrefill
from baton.core.types import Prediction, RequestId
from baton.decide.control.decision_log import Decision, coordinator_events
from baton.lab.report.timeline import FirstTokens

GAPS_MIN = 3
"""Minimum gaps between the tokens of an answer whose TPOT counts: of shorter ones it depends on a single step."""


class Accuracy(Struct, frozen=True, kw_only=True):
    """How far predictions of one latency were from the actual values."""

    requests: int
    ratio_p10: float
    """Actual / predicted, as quantiles over the requests."""
    ratio_p50: float
    ratio_p90: float
    error_p50: float
    """|actual / predicted - 1|, as quantiles over the requests."""
    error_p90: float


@dataclass(slots=True)
class _Open:
    """A routed request whose answer has not ended."""

    routed_at_s: float
    predicted: Prediction
    first_s: float | None = None


@dataclass(slots=True)
class PredictionRatios:
    """Ratios of actual to predicted latencies in a decision log. `take` expects every decision, in order.

    Requests without a prediction, and requests that needed a second attempt, are left out.
    """

    ttft: list[float] = field(default_factory=list[float])
    tpot: list[float] = field(default_factory=list[float])
    _open: dict[RequestId, _Open] = field(default_factory=dict[RequestId, _Open])
    _first_tokens: FirstTokens = field(default_factory=FirstTokens)

    def take(self, decision: Decision) -> None:
        now_s = decision.now_s
        for request_id in self._first_tokens.take(decision):
            opened = self._open.get(request_id)
            if opened is not None and opened.first_s is None:
                opened.first_s = now_s
                self.ttft.append((now_s - opened.routed_at_s) / opened.predicted.ttft_s)
        for event in coordinator_events(decision.event):
            if isinstance(event, RequestFinished):
                self._finish(event, now_s)
        for command in decision.commands:
            if isinstance(command, StartPrefill):
                if command.attempt == 1 and command.predicted is not None and command.predicted.ttft_s > 0:
                    self._open[command.request.id] = _Open(now_s, command.predicted)
                else:
                    self._open.pop(command.request.id, None)
            elif isinstance(command, CloseRequest):
                self._open.pop(command.request_id, None)

    def _finish(self, event: RequestFinished, now_s: float) -> None:
        opened, gaps = self._open.get(event.request_id), event.output_tokens - 1
        if opened is None or opened.first_s is None or gaps < GAPS_MIN or opened.predicted.tpot_s <= 0:
            return
        self.tpot.append((now_s - opened.first_s) / gaps / opened.predicted.tpot_s)


def accuracy(ratios: Sequence[float]) -> Accuracy | None:
    """Return the quantiles of ratios of actual to predicted latencies, or None if there is no ratio."""
    if not ratios:
        return None
    ordered, errors = sorted(ratios), sorted(abs(ratio - 1) for ratio in ratios)
    return Accuracy(
        requests=len(ordered),
        ratio_p10=_quantile(ordered, 0.1), ratio_p50=_quantile(ordered, 0.5), ratio_p90=_quantile(ordered, 0.9),
        error_p50=_quantile(errors, 0.5), error_p90=_quantile(errors, 0.9),
    )  # fmt: skip


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
