"""Numbers of a cost section that are none: each is refused under its name, with what would be one."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.core.validation import out_of_range
from baton.decide.cost.engine_profile import profiles
from baton.decide.cost.linear import LinearCost
from baton.decide.cost.load import load_cost

WIRE = {"bytes_per_s": 25e9}
ENGINE = {"name": "own", "version": "1", "prompt": {"factor": 1.0}, "decode": {"factor": 1.0}}
ROOFLINE = {"model": "roofline", "llm": "llama3.1-8b", "hardware": "l4"}
SPLITWISE = {"model": "splitwise-sim", "llm": "llama2-70b", "hardware": "a100"}
DISTSERVE = {"model": "table", "profile": "distserve", "llm": "opt-13b", "engine": "distserve"}
FIT = {"start_s": 0.01, "band_s": [0.0] * 5, "sequence_s": 0.0, "decode_s": 0.0, "pair_s": 0.0, "context_token_s": 0.0}
FITTED = {"model": "fitted", "fit": FIT}


@pytest.mark.parametrize("number", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("section", "key"),
    [
        (ROOFLINE, "usd_per_hour"),
        *((ROOFLINE | {"wire": WIRE}, f"wire.{key}") for key in ("bytes_per_s", "latency_s", "residue_s")),
        *(
            (ROOFLINE | {"engine": ENGINE}, f"engine.{key}")
            for key in ("prompt.factor", "decode.overhead_s", "layer_s")
        ),
        (ROOFLINE | {"draft": {"llm": "llama3.2-1b"}}, "draft.acceptance_ratio"),
        (SPLITWISE, "prompt_factor"),
        *((DISTSERVE | {"wire": WIRE}, key) for key in ("prompt_factor", "wire.bytes_per_s")),
        *((FITTED, f"fit.{key}") for key in ("start_s", "band_s[3]", "context_token_s", "handoff_token_s")),
        *(({}, key) for key in LinearCost.__struct_fields__),
    ],
)
def test_a_number_that_no_cost_can_have_is_refused_under_its_name(
    section: dict[str, Any], key: str, number: float
) -> None:
    """Each key by itself, and with what would be one."""
    (line,) = problems(put(section, key, number))
    assert line.startswith(f"cost.{key} is {number:g}, but must be ")


@pytest.mark.parametrize(
    ("section", "key"),
    [
        *((ROOFLINE, key) for key in ("tp", "pp", "cp", "dcp", "dp", "ep")),
        *((ROOFLINE | {"wire": WIRE}, key) for key in ("wire.block_tokens", "wire.bytes_per_s")),
        *((DISTSERVE, key) for key in ("tp", "pp")),
        (ROOFLINE | {"draft": {"llm": "llama3.2-1b"}}, "draft.tokens"),
        (SPLITWISE, "tp"),
    ],
)
def test_what_there_must_be_one_of_is_not_none(section: dict[str, Any], key: str) -> None:
    (line,) = problems(put(section, key, 0))
    assert line.startswith(f"cost.{key} is 0, but must be ")


def test_a_fit_whose_steps_take_no_time_is_refused() -> None:
    (line,) = problems(put(FITTED, "fit.start_s", 0.0))
    assert "a step of one token that takes no time" in line


def test_every_number_that_is_none_is_told_at_once() -> None:
    section = {"kinds": {"a": put(ROOFLINE | {"wire": WIRE}, "wire.bytes_per_s", -5e9) | {"tp": 0}, "b": {"typo": 1}}}
    firsts = [line.split()[0] for line in problems(section)]
    assert firsts == ["cost.kinds.a.tp", "cost.kinds.a.wire.bytes_per_s", "unknown"]


def test_the_engines_of_the_catalogue_are_within_the_ranges_of_their_keys() -> None:
    assert [line for profile in profiles() for line in out_of_range(profile, profile.name)] == []


def problems(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_cost(raw, folder=Path())
    return str(caught.value).splitlines()


def put(section: dict[str, Any], key: str, value: float) -> dict[str, Any]:
    """A copy of the section with one key of it, or of a section below, at a value."""
    made = copy.deepcopy(section)
    *above, last = key.split(".")
    at: Any = made
    for name in above:
        at = at[name]
    if last.endswith("]"):
        last, _, index = last[:-1].partition("[")
        at, last = at[last], int(index)
    at[last] = value
    return made
