"""A file is corrected in one go: whatever does not fit is said at once, wherever it stands."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.validation import Count, Ratio, Seconds, out_of_range, type_problems
from baton.lab.plan.spec import PlanSpec, read_plan_input
from baton.lab.sim.spec import ClusterSpec, load_spec

NEEDED: dict[str, object] = {"llm": "x", "hardware": [], "slo": {"ttft_s": 1.0, "tpot_s": 1.0}, "workload": {}}
"""What a plan cannot do without."""


def test_what_fits_has_no_misfit() -> None:
    cluster = {"topology": {"prefill": 2}, "workers": [{"role": "mixed"}], "kinds": {"a": {"cost": {"model": "x"}}}}
    assert type_problems(cluster, ClusterSpec) == []


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        ({"cells": "x"}, ClusterSpec, ["cells is 'x', but must be a whole number"]),
        (
            {"worker_start_s": "5e1"},
            ClusterSpec,
            ["worker_start_s is '5e1', but must be a number; as a number it is 5.000000e+01"],
        ),
        ({"kv": {"blocs": 1}}, ClusterSpec, ["unknown key kv.blocs (did you mean 'blocks'?)"]),
        ({"kv": []}, ClusterSpec, ["kv must be a section: write [kv] and its keys below"]),
        ({"workers": {}}, ClusterSpec, ["workers is {}, but must be a list"]),
        ({"workers": [{"role": "mixed"}, {}]}, ClusterSpec, ["workers[1].role is missing"]),
        ({"kinds": {"a": {"cost": {}, "kv": None}}}, ClusterSpec, []),
        (
            {"kinds": {"a": {"cost": {}, "kv": {"blocks": "x"}}}},
            ClusterSpec,
            ["kinds.a.kv.blocks is 'x', but must be a whole number"],
        ),
    ],
)
def test_a_misfit_says_where_it_stands_and_what_would_fit(
    raw: dict[str, object], kind: type[msgspec.Struct], words: list[str]
) -> None:
    assert type_problems(raw, kind) == words


def test_a_value_has_a_misfit_exactly_if_the_decoder_refuses_it() -> None:
    """Otherwise a file would be refused without a reason, or taken with one."""
    values: tuple[object, ...] = (
        None,
        True,
        3,
        2.5,
        "x",
        [],
        ["x"],
        {},
        {"x": 3},
        [{"role": "mixed"}],
        {"a": {"cost": {}}},
    )
    for field in (*ClusterSpec.__struct_fields__, *PlanSpec.__struct_fields__):
        kind = ClusterSpec if field in ClusterSpec.__struct_fields__ else PlanSpec
        whole: dict[str, object] = {} if kind is ClusterSpec else dict(NEEDED)
        for value in values:
            raw = {**whole, field: value}
            try:
                msgspec.convert(raw, kind)
                fits = True
            except msgspec.ValidationError:
                fits = False
            assert (type_problems(raw, kind) == []) is fits, (field, value)


def test_a_plan_and_a_cluster_name_every_misfit() -> None:
    with pytest.raises(ConfigError) as cluster:
        load_spec("cells = 1.5\n[[workers]]\nrole = 'cook'\ncount = 'two'\nhots = 3\n[[tiers]]\nblocks = 'a'")
    lines = str(cluster.value).splitlines()
    places = ("cells", "workers[0].role", "workers[0].count", "unknown key workers[0].hots", "tiers[0].blocks")
    assert [place in line for place, line in zip(places, lines, strict=True)] == [True] * 5
    with pytest.raises(ConfigError) as plan:
        read_plan_input({**NEEDED, "llm": 3, "hardware": [{"gpus": 1}], "slo": {"ttft_s": "x"}}, Path())
    lines = str(plan.value).splitlines()
    places = ("llm", "hardware[0].name", "slo.ttft_s", "slo.tpot_s")
    assert [place in line for place, line in zip(places, lines, strict=True)] == [True] * 4


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
        (Section(share_ratio=math.inf), "share_ratio is inf, but must be between 0 and 1"),
        (Section(share_ratio=1.01), "share_ratio is 1.01, but must be between 0 and 1"),
    ],
)
def test_a_number_beyond_its_bounds_is_told(section: Section, said: str) -> None:
    assert out_of_range(section) == [said]


def test_bounds_are_within() -> None:
    assert out_of_range(Section(count=1, wait_s=0.0, share_ratio=1.0)) == []
    assert out_of_range(Section(count=2**63, wait_s=1e308, share_ratio=0.0)) == []
