"""The precision of workers by role."""

from __future__ import annotations

import pytest

from baton.compute.models.dtype import Precision, phase_precisions
from baton.core.config import Config, PhaseConfig, load
from baton.core.errors import ConfigError


def test_without_phases_all_workers_are_alike() -> None:
    assert phase_precisions(Config(weights="stored"), "cpu") == {}


def test_a_phase_keeps_what_it_does_not_set() -> None:
    config = Config(dtype="bfloat16", decode=PhaseConfig(weights="stored"), prefill=PhaseConfig(dtype="float32"))
    assert phase_precisions(config, "cpu") == {
        "prefill": Precision("float32", "dense"),
        "decode": Precision("bfloat16", "stored"),
        "mixed": Precision("bfloat16", "dense"),
    }


def test_auto_is_chosen_for_each_phase() -> None:
    """Quantized weights compute in bfloat16, dense ones on a CPU in float32."""
    found = phase_precisions(Config(decode=PhaseConfig(weights="int8")), "cpu")
    assert (found["prefill"].dtype, found["decode"].dtype) == ("float32", "bfloat16")


def test_a_phase_is_validated() -> None:
    with pytest.raises(ConfigError, match=r"decode\.weights"):
        load("[decode]\nweights = 'int3'\n")
    with pytest.raises(ConfigError, match="dtype"):
        load("[prefill]\ndtyp = 'bfloat16'\n")
