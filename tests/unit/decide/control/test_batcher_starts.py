"""What a batcher says of requests that it begins or goes on with, and what their blocks have to do with it."""

from __future__ import annotations

from baton.core.messages import RequestDropped, StartRequest, StopRequest
from baton.core.types import BlockId, RequestId, pack_tokens
from tests.unit.decide.control.test_batcher_prompts import Bench, W, in_step, request


def test_a_start_is_told_with_the_report_of_its_step() -> None:
    bench = Bench()
    bench.start("a", list(range(6)), output=3)
    while bench.step().slices:
        pass
    assert [report.started for report in bench.reports if report.tokens] == [("a",), (), ()]
    assert all(not report.started for report in bench.reports if not report.tokens)


def test_a_continued_request_is_not_reported_as_started() -> None:
    """Nor has it anything to say before its first step: the next token tells that it decodes."""
    bench, prompt = Bench(), list(range(6))
    made = request("a", prompt, output=3)
    table = (BlockId(0), BlockId(1), BlockId(2))
    bench.batcher.apply([StartRequest(made, 1, pack_tokens([*prompt, 9]), "end", table, 6)])
    assert in_step(bench.batcher.plan(0.0)) == ["a"]
    assert bench.batcher.take_report(now_s=0.0) is None


def test_a_stop_of_unstarted_requests_leaves_those_that_were_in_a_step() -> None:
    bench = Bench()
    bench.start("a", list(range(6)), output=3)
    assert bench.step().slices
    bench.start("b", list(range(6, 12)), output=3)
    for name in ("a", "b"):
        bench.batcher.apply([StopRequest(RequestId(name), 1, W, only_unstarted=True)])
    report = bench.batcher.take_report(now_s=0.0)
    assert report is not None
    assert [event.request_id for event in report.events if isinstance(event, RequestDropped)] == ["b"]
    assert in_step(bench.step()) == ["a"]
