"""The accuracy of predictions, from a decision log."""

from __future__ import annotations

import pytest

from baton.core.messages import CloseRequest, PrefillFinished, RequestFinished, StartPrefill
from baton.core.types import Prediction, Request, RequestId, WorkerId
from baton.decide.control.cluster_messages import WorkerSaid
from baton.decide.control.decision_log import Decision
from baton.lab.report.prediction_table import PredictionRatios, accuracy

A, P, D = RequestId("a"), WorkerId("p"), WorkerId("d")
REQUEST = Request(id=A, prompt_tokens=8, output_tokens_max=11, arrived_at_s=0.0)
PREDICTED = Prediction(0.5, 0.02)


def started(now_s: float, attempt: int = 1) -> Decision:
    """Log the start of the prompt. The event does not matter here."""
    start = StartPrefill(REQUEST, attempt, P, "first_token", predicted=PREDICTED)
    return Decision(now_s, WorkerSaid(P, (), ()), (start,))


def finished(now_s: float) -> Decision:
    done = RequestFinished(A, 1, D, "length", 11)
    return Decision(now_s, WorkerSaid(D, (), (done,)), (CloseRequest(A, "finished"),))


def test_ratios_are_actual_over_predicted_from_the_route_on() -> None:
    ratios = PredictionRatios()
    first = Decision(2.0, WorkerSaid(P, (), (PrefillFinished(A, 1, P, 8),)), ())
    for decision in (started(1.0), first, finished(2.3)):
        ratios.take(decision)
    assert ratios.ttft == pytest.approx([2.0])
    assert ratios.tpot == pytest.approx([0.03 / 0.02])


def test_a_second_attempt_is_not_compared() -> None:
    ratios = PredictionRatios()
    first = Decision(2.0, WorkerSaid(P, (), (PrefillFinished(A, 2, P, 8),)), ())
    for decision in (started(1.0), started(1.5, attempt=2), first, finished(2.3)):
        ratios.take(decision)
    assert not ratios.ttft
    assert not ratios.tpot


def test_quantiles_of_ratios_and_errors() -> None:
    found = accuracy([0.5 + 0.1 * index for index in range(11)])
    assert found is not None
    assert (found.requests, found.ratio_p10, found.ratio_p50, found.ratio_p90) == pytest.approx((11, 0.6, 1.0, 1.4))
    assert (found.error_p50, found.error_p90) == pytest.approx((0.3, 0.5))
    assert accuracy([]) is None
