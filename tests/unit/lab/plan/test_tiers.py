"""A tier below the arenas: searched, priced, and taken only where it pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from baton.core.config import SloConfig
from baton.core.errors import ConfigError
from baton.lab.plan.recommend import recommend
from baton.lab.plan.serving import serve_config
from baton.lab.plan.spec import read_plan_input
from baton.lab.plan.tiers import TierAdvice, TierSpec, choose_tier, describe_tiers, hit_ratio
from baton.lab.workload.request import TraceRequest
from tests.unit.lab.plan.questions import search

CHATS: dict[str, Any] = {
    "llm": "llama3.1-8b", "tp": [1], "shape": "disaggregated",
    "hardware": [{"name": "H100-80G-SXM", "gpus": 8}],
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    "workload": {"input_tokens": 8192, "output_tokens": 200},
}  # fmt: skip
ROUNDS, CHAT_BLOCKS = 4, 16
PLENTY = TierSpec(name="memory", size_bytes=4e12, bytes_per_s=50e9)


def asked(*ids: int) -> TraceRequest:
    """A prompt of so many blocks of 512 tokens."""
    return TraceRequest(
        at_s=0.0, input_tokens=512 * len(ids), output_tokens=200, prefix_ids=ids, prefix_block_tokens=512
    )


def chats(count: int) -> list[TraceRequest]:
    """So many conversations, each as long as a mean prompt, in turn, and again in the next round."""
    names = [tuple(range(CHAT_BLOCKS * chat, CHAT_BLOCKS * (chat + 1))) for chat in range(count)]
    return [asked(*ids) for _ in range(ROUNDS) for ids in names]


def chosen(tier: TierSpec, count: int = 2_000) -> list[TierAdvice]:
    """Of a tier and none, the better first, for conversations of which the arenas hold some hundred."""
    return choose_tier(search(CHATS), "disaggregated", [tier], chats(count))[1]


def test_hits_are_leading_blocks_that_were_asked_for_lately() -> None:
    requests = [asked(1, 2), asked(1, 2, 3), asked(4, 2)]
    assert hit_ratio(requests, 1e9) == pytest.approx(1024 / (7 * 512)), "2 is no hit behind a 4"
    assert hit_ratio(requests, 512) == pytest.approx(512 / (7 * 512)), "of two blocks the first is kept"
    assert hit_ratio([asked(1), asked(1)], 1e9) == pytest.approx(511 / 1024), "the last token is always computed"


def test_a_tier_that_holds_what_the_arenas_cannot_is_taken() -> None:
    best, other = chosen(PLENTY)
    assert (best.tier, other.tier) == ("memory", "")
    assert best.cached_ratio == pytest.approx(1 - 1 / ROUNDS, abs=0.01)
    assert other.cached_ratio == 0.0, "who comes in turn finds nothing in a cache that is too small for all"
    assert best.rate_rps > 1.5 * other.rate_rps
    assert describe_tiers([best, other])[0].startswith("tier memory is recommended: 75% of the prompt tokens")


def test_one_that_is_too_slow_too_dear_or_not_needed_is_not() -> None:
    slow = TierSpec(name="disk", size_bytes=4e12, bytes_per_s=0.5e9)
    assert chosen(slow)[0].tier == "", "a prompt's KV of a gigabyte takes longer than its TTFT"
    assert chosen(TierSpec(name="gold", size_bytes=4e12, bytes_per_s=50e9, usd_per_hour=100.0))[0].tier == ""
    few = chosen(TierSpec(name="more", size_bytes=4e12, bytes_per_s=50e9, usd_per_hour=0.1), count=10)
    assert few[0].tier == "", "the arenas hold ten conversations themselves"
    assert few[0].cached_ratio == few[1].cached_ratio > 0.7


def test_the_search_goes_on_with_the_tier() -> None:
    before = search(CHATS)
    after, (best, _) = choose_tier(before, "disaggregated", [PLENTY], chats(2_000))
    assert after.demand.cached_ratio == best.cached_ratio
    assert after.demand.slo.ttft_s == pytest.approx(before.demand.slo.ttft_s - best.load_s)
    fleet = after.fleet("disaggregated")
    assert fleet is not None
    assert fleet.rate_rps == best.rate_rps


def test_the_server_is_given_the_slo_that_was_asked_for() -> None:
    """The search takes loading off the TTFT. So does the server, of every request: it must not be taken off twice."""
    question = read_plan_input({**CHATS, "finalists": 0, "admission": ["slo"]}, Path())
    spec = replace(question.spec, tiers=(PLENTY,))
    found = recommend(replace(question, spec=spec, requests=tuple(chats(2_000))))
    assert found.tiers[0].tier == PLENTY.name
    assert found.search.demand.slo.ttft_s < 1.0
    assert serve_config(found).slo == SloConfig(ttft_s=1.0, tpot_s=0.05)


def test_what_a_tier_needs_is_said_at_once() -> None:
    tiers = [
        {"name": "a", "size_bytes": 0, "bytes_per_s": -1.0},
        {"name": "b", "size_bytes": 1, "bytes_per_s": 1, "latency_s": -1},
    ]
    workload = CHATS["workload"] | {"cached_ratio": 0.5}
    with pytest.raises(ConfigError) as error:
        read_plan_input({**CHATS, "workload": workload, "tiers": tiers}, Path())
    wrong = ("tiers[0].size_bytes is 0", "tiers[0].bytes_per_s is -1", "tiers[1].latency_s is -1")
    said = (*wrong, "are both given", "share prefixes")
    for words in said:
        assert words in str(error.value)
