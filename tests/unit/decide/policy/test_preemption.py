"""How a preempted request gets its KV back: what the setting says, and what `cheaper` makes of prices."""

from __future__ import annotations

import pytest

from baton.core.kv_config import Preemption
from baton.core.types import TierHit
from baton.decide.control.tier_reads import read_back_tokens
from tests.unit.decide.policy.views import COST

FULL_TOKENS = 1000
HELD_TOKENS = 200


def back(way: Preemption, *hits: TierHit, beside: int = 0) -> int:
    return read_back_tokens(way, FULL_TOKENS, HELD_TOKENS, hits, COST, beside=beside)


@pytest.mark.parametrize("load_s", [0.01, 10.0])
def test_two_of_the_ways_ask_for_no_price(load_s: float) -> None:
    hit = TierHit(FULL_TOKENS, load_s)
    assert back("recompute", hit) == HELD_TOKENS
    assert back("swap", hit) == FULL_TOKENS


@pytest.mark.parametrize(("load_s", "tokens"), [(0.79, FULL_TOKENS), (0.81, HELD_TOKENS)])
def test_the_cheaper_way_compares_reading_with_computing_what_is_missing(load_s: float, tokens: int) -> None:
    """800 tokens are missing and take 0.8 s to compute; the one after them is computed either way."""
    assert back("cheaper", TierHit(FULL_TOKENS, load_s)) == tokens


@pytest.mark.parametrize(("load_s", "tokens"), [(3.9, FULL_TOKENS), (4.1, HELD_TOKENS)])
def test_the_cheaper_way_counts_what_others_would_wait_for(load_s: float, tokens: int) -> None:
    """0.8 s of computing, in steps that five requests share."""
    assert back("cheaper", TierHit(FULL_TOKENS, load_s), beside=4) == tokens


def test_the_cheaper_way_leaves_a_slow_tier_and_reads_the_fast_one_before_it() -> None:
    assert back("cheaper", TierHit(600, 0.1), TierHit(FULL_TOKENS, 2.0)) == 600


@pytest.mark.parametrize("way", ["cheaper", "swap", "recompute"])
def test_where_tiers_have_nothing_nothing_is_read(way: Preemption) -> None:
    assert back(way) == HELD_TOKENS
