"""Results of slices without a token: the token masks of a grammar are late, or the grammar cannot be followed."""

from __future__ import annotations

from baton.core.messages import RequestFailed
from baton.core.step import SliceResult, Step, StepResult
from tests.property.little_cluster import text_alone
from tests.unit.decide.control.test_batcher_prompts import Bench, W

PROMPT = list(range(20, 29))


def _late(bench: Bench) -> Step:
    """Compute a step whose masks are late."""
    bench.batcher.plan(0.0)
    bench.report()
    step = bench.batcher.plan(0.0)
    for part in step.slices:
        bench.arena.compute(part)
    bench.batcher.commit(step, StepResult([SliceResult() for _ in step.slices]))
    bench.report()
    return step


def test_a_slice_without_its_token_is_sampled_again_in_the_next_step() -> None:
    """After the prompt and between two outputs. The text does not change."""
    bench = Bench()
    made = bench.start("a", PROMPT)
    counts = [part.count for step in (_late(bench), _late(bench), bench.step(), _late(bench)) for part in step.slices]
    assert counts == [len(PROMPT), 1, 1, 1]
    while bench.step().slices:
        pass
    assert bench.output("a") == text_alone(made, PROMPT)


def test_a_failed_slice_fails_its_request_alone() -> None:
    bench = Bench()
    broken, _fine = bench.start("broken", PROMPT), bench.start("fine", list(reversed(PROMPT)))
    bench.batcher.plan(0.0)
    bench.report()
    step = bench.batcher.plan(0.0)
    results = [bench.arena.compute(part) for part in step.slices]
    results[0] = SliceResult(failure="no grammar")
    bench.batcher.commit(step, StepResult(results))
    bench.report()
    assert RequestFailed(broken.id, 1, W, "no grammar") in [
        event for report in bench.reports for event in report.events
    ]
    while bench.step().slices:
        pass
    assert len(bench.output("fine")) == 4
