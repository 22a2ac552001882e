"""Service classes in one batcher: what a step leaves out for the prompt of a more urgent class."""

from __future__ import annotations

from baton.core.types import ServiceClass
from tests.property.little_cluster import text_alone
from tests.unit.decide.control.test_batcher_prompts import Bench


def test_decodes_skip_every_other_step_of_a_prompt_whose_class_has_reserved_steps() -> None:
    bench = Bench(step_tokens_max=16)
    free, premium = ServiceClass(name="free", step_ratio=0.5), ServiceClass(name="premium", priority=-1)
    bench.start("free", [1, 2], output=20, service=free)
    bench.step()
    prompt = list(range(200, 240))
    urgent = bench.start("premium", prompt, output=2, service=premium)
    steps = [{part.request_id: part.count for part in bench.step().slices} for _ in range(4)]
    assert steps == [{"premium": 16}, {"free": 1, "premium": 15}, {"premium": 9}, {"free": 1, "premium": 1}]
    assert bench.output("premium") == text_alone(urgent, prompt)
