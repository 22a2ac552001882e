"""A host on another device is told of, with what to set; what was set is nobody's mistake."""

from __future__ import annotations

import msgspec
import pytest

from baton.core.config import load
from baton.core.types import HostId
from baton.serve.live.hosts import mispriced

GPU = {"step_overhead_s": 0.005, "prefill_token_s": 2e-6, "handoff_token_s": 2e-5}
CPU = {"step_overhead_s": 0.04, "prefill_token_s": 2e-3, "handoff_token_s": 2e-5}
HOST = HostId("gpu-a")


def test_what_differs_is_told_with_a_section_to_copy() -> None:
    said = mispriced(HOST, GPU, believed=CPU, given={})
    assert "step_overhead_s 0.005, not 0.04, prefill_token_s 2e-06, not 0.002;" in said
    line = said[said.index("cost = ") : said.index("}") + 1]
    assert load(line).cost == GPU, "it is what a configuration takes"


@pytest.mark.parametrize(
    ("prices", "given"),
    [
        (CPU, {}),
        ({key: price * 1.9 for key, price in CPU.items()}, {}),
        ({}, {}),
        (GPU, {"model": "roofline", "llm": "llama3.1-8b", "hardware": "H100"}),
        (GPU, {"kinds": {"a": {}}}),
        (GPU, {"step_overhead_s": 0.04, "prefill_token_s": 2e-3}),
    ],
)
def test_what_is_alike_or_was_set_is_not(prices: dict[str, float], given: dict[str, object]) -> None:
    assert mispriced(HOST, prices, believed=CPU, given=given) == ""


def test_a_price_of_nothing_is_no_division_by_it() -> None:
    believed = msgspec.json.decode(b'{"step_overhead_s": 0.0}')
    assert "step_overhead_s 0.005, not 0" in mispriced(HOST, GPU, believed=believed, given={})
