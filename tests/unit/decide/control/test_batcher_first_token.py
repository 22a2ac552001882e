"""Prompts of which another worker draws the first token."""

from __future__ import annotations

from baton.core.messages import PrefillFinished
from tests.unit.decide.control.test_batcher_prompts import Bench, W


def test_a_prompt_whose_first_token_is_left_ends_before_its_last_token() -> None:
    """The prefill worker samples no token and leaves the KV of the last token to the decode worker."""
    bench = Bench()
    made = bench.start("a", [1, 2, 3, 4, 5], until="prompt")
    step = bench.step()
    assert [(part.count, part.sample) for part in step.slices] == [(4, False)]
    assert PrefillFinished(made.id, 1, W, 4) in bench.reports[-1].events
    assert bench.output("a") == []
    assert not bench.step().slices


def test_a_prompt_whose_first_token_is_left_may_be_there_already() -> None:
    bench = Bench()
    bench.start("a", list(range(20, 29)))
    while bench.step().slices:
        pass
    made = bench.start("b", list(range(20, 29)), until="prompt")
    assert not bench.step().slices
    assert PrefillFinished(made.id, 1, W, 8) in [event for report in bench.reports for event in report.events]
