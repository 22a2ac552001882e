"""Numbers that a key does not take, however they are written."""

from __future__ import annotations

import math

import pytest
from msgspec import Struct

from baton.core.ranges import Count, Ratio, Seconds, out_of_range


class Section(Struct):
    count: Count = 1
    wait_s: Seconds = 0.0
    share_ratio: Ratio = 0.5


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (Section(count=0), "count is 0, but must be at least 1 and finite"),
        (Section(count=10**400), "count is above 1e308, but must be at least 1 and finite"),
        (Section(count=-(10**400)), "count is below -1e308, but must be at least 1 and finite"),
        (Section(wait_s=math.nan), "wait_s is nan, but must be at least 0 and finite: write seconds, such as 0.001"),
        (Section(share_ratio=math.inf), "share_ratio is inf, but must be from 0 to 1"),
        (Section(share_ratio=1.01), "share_ratio is 1.01, but must be from 0 to 1"),
    ],
)
def test_a_number_beyond_its_bounds_is_told(section: Section, said: str) -> None:
    assert out_of_range(section) == [said]


def test_bounds_are_within() -> None:
    assert out_of_range(Section(count=1, wait_s=0.0, share_ratio=1.0)) == []
    assert out_of_range(Section(count=2**63, wait_s=1e308, share_ratio=0.0)) == []
