"""How far the answers of a worker are ahead of the pace of their TPOT SLOs, as the batcher counts and reports it."""

from __future__ import annotations

import pytest

from baton.core.config import BatchLimits
from baton.core.messages import StartRequest
from baton.core.report_parts import AnswerPace
from baton.core.step import SliceResult, StepResult
from baton.core.types import BlockId, Request, RequestId, Slo, pack_tokens
from baton.decide.policy.batching import PACE_RATIO, SloChunked
from tests.property.little_cluster import new_batcher
from tests.unit.decide.control.test_batcher_prompts import W

TABLE = tuple(map(BlockId, range(20)))


def paced(token_s: float) -> float:
    """Return the TPOT SLO of answers with this pace."""
    return token_s / PACE_RATIO


class Worker:
    """A worker whose steps end when the test says."""

    def __init__(self) -> None:
        self.batcher = new_batcher(W, BatchLimits(step_tokens_max=64, requests_max=4), batching=SloChunked())

    def start(self, name: str, tpot_s: float | None, *, prompt_tokens: int = 6, output_tokens: int = 0) -> None:
        slo = None if tpot_s is None else Slo(ttft_s=0.4, tpot_s=tpot_s)
        request = Request(
            id=RequestId(name), prompt_tokens=prompt_tokens, output_tokens_max=50, arrived_at_s=0.0, slo=slo
        )
        tokens = pack_tokens([7] * (prompt_tokens + output_tokens))
        computed_tokens = prompt_tokens if output_tokens else 0
        self.batcher.apply([StartRequest(request, 1, tokens, "end", TABLE, computed_tokens)])

    def steps(self, *times_s: float) -> None:
        """Run a step from each of these times on."""
        for now_s in times_s:
            step = self.batcher.plan(now_s)
            self.batcher.commit(step, StepResult([SliceResult(token=7) for _ in step.slices]))

    def pace(self, now_s: float) -> AnswerPace | None:
        return self.batcher.view(now_s).pace


def test_an_answer_is_ahead_by_the_time_that_its_tokens_came_early() -> None:
    """The first token is there at 1.0 s. Three more at 1.3 s are 0.6 s early, by a pace of 0.3 s."""
    worker = Worker()
    worker.start("a", paced(0.3))
    worker.steps(0.0, 1.0, 1.1, 1.2)
    assert worker.pace(1.3) == AnswerPace(pytest.approx(0.3), pytest.approx(0.6))
    assert worker.pace(2.3) == AnswerPace(pytest.approx(0.3), pytest.approx(-0.4))


def test_an_answer_that_was_handed_off_starts_one_token_behind() -> None:
    """The time between its first token, on another worker, and its first step here is not known."""
    worker = Worker()
    worker.start("a", paced(0.3), output_tokens=1)
    worker.steps(5.0, 5.1, 5.2)
    assert worker.pace(5.3) == AnswerPace(pytest.approx(0.3), pytest.approx(3 * 0.3 - 0.3 - 0.3))


def test_the_answer_that_is_least_ahead_counts() -> None:
    """Of 0.3 and 0.1 s, the faster pace is reported; answers without an SLO do not count."""
    worker = Worker()
    worker.start("none", None)
    worker.steps(0.0)
    assert worker.pace(0.1) is None
    worker.start("a", paced(0.3))
    worker.steps(0.1, 0.2, 0.3)
    worker.start("b", paced(0.1))
    worker.steps(0.4, 0.5, 0.6)
    assert worker.pace(0.7) == AnswerPace(pytest.approx(0.1), pytest.approx(2 * 0.1 - 0.2))


@pytest.mark.parametrize(("step_s", "is_ahead"), [(0.01, True), (0.06, False)])
def test_a_prompt_spends_the_time_that_the_answers_are_ahead(step_s: float, is_ahead: bool) -> None:
    """After 20 steps of 10 ms, a TPOT of 60 ms leaves 1 s. Then a whole urgent prompt is in one step, else a part."""
    worker = Worker()
    worker.start("a", 0.06)
    worker.steps(*(step_s * number for number in range(21)))
    worker.start("b", 0.06, prompt_tokens=60)
    decode, prompt = worker.batcher.plan(21 * step_s).slices
    assert decode.count == 1
    assert (prompt.count == 60) == is_ahead
