"""A file is corrected in one go: whatever does not fit is said at once, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.core.errors import ConfigError
from baton.core.misfits import misfits
from baton.lab.plan.spec import PlanSpec, read_plan_input
from baton.lab.sim.spec import ClusterSpec, load_spec

NEEDED: dict[str, object] = {"llm": "x", "hardware": [], "slo": {"ttft_s": 1.0, "tpot_s": 1.0}, "workload": {}}
"""What a plan cannot do without."""


def test_what_fits_has_no_misfit() -> None:
    cluster = {"topology": {"prefill": 2}, "workers": [{"role": "mixed"}], "kinds": {"a": {"cost": {"model": "x"}}}}
    assert misfits(cluster, ClusterSpec) == []


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        ({"cells": "x"}, ClusterSpec, ["cells does not fit: Expected `int`, got `str`"]),
        (
            {"worker_start_s": "5e1"},
            ClusterSpec,
            ["worker_start_s does not fit: Expected `float`, got `str`; as a number it is 5.000000e+01"],
        ),
        ({"kv": {"blocs": 1}}, ClusterSpec, ["unknown key kv.blocs (did you mean 'blocks'?)"]),
        ({"kv": []}, ClusterSpec, ["kv must be a section: write [kv] and its keys below"]),
        ({"workers": {}}, ClusterSpec, ["workers does not fit: Expected `array`, got `object`"]),
        ({"workers": [{"role": "mixed"}, {}]}, ClusterSpec, ["workers[1].role is missing"]),
        ({"kinds": {"a": {"cost": {}, "kv": None}}}, ClusterSpec, []),
        (
            {"kinds": {"a": {"cost": {}, "kv": {"blocks": "x"}}}},
            ClusterSpec,
            ["kinds.a.kv.blocks does not fit: Expected `int`, got `str`"],
        ),
    ],
)
def test_a_misfit_says_where_it_stands_and_what_would_fit(
    raw: dict[str, object], kind: type[msgspec.Struct], words: list[str]
) -> None:
    assert misfits(raw, kind) == words


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
            assert (misfits(raw, kind) == []) is fits, (field, value)


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
