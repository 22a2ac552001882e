"""The native engine and the copies on 64-bit ARM: compiled there, run in emulation, equal to this machine's.

Emulation shows results, and neither speed nor the memory order of ARM processors, which is weaker than that of x86.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from baton.core.config import LoadFormat
from tests.arm_machine import ArmMachine, arm_machine
from tests.dummies import small
from tests.unit.compute.native_greedy import greedy

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1800)]
SEEDS = 8
BEST = {"max": "NEON_DOT", "cortex-a72": "NEON"}
"""The instruction set that each emulated processor gets. The Cortex-A72 has no products of bytes."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "stored": 0.05}
"""The largest difference of a log probability between NEON and this machine's instructions, by precision."""


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> ArmMachine:
    machine = arm_machine(tmp_path_factory.mktemp("arm"))
    machine.python("-m", "baton.compute.native.build", "--all")  # emulation shows the /proc/cpuinfo of this machine
    return machine


@pytest.mark.parametrize("processor", BEST)
def test_random_models_on_arm(arm: ArmMachine, processor: str) -> None:
    """Random models, ragged steps and block tables: equal to plain C++, with the same bits alone and in a batch."""
    path = arm.python("-c", "from baton.compute.native.build import library_path; print(library_path())").strip()
    shown = arm.python("-m", "tests.unit.compute.native_fuzz", path, str(SEEDS), processor=processor)
    assert shown.startswith(f"{SEEDS} models on {BEST[processor]}")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "deepseek-v2-lite"])
@pytest.mark.parametrize("processor", BEST)
def test_texts_on_arm(arm: ArmMachine, processor: str, shape: str, dtype: str, tmp_path: Path) -> None:
    """The same greedy text as here, with log probabilities within a bound, for random weights in every precision."""
    model = small(shape, tmp_path)
    _compare(arm, processor, model, "dummy", dtype)


def test_the_text_of_a_real_model_on_arm(arm: ArmMachine) -> None:
    """SmolLM2-135M, which takes a minute to load in emulation."""
    _compare(arm, "max", "smollm2-135m", "auto", "float32")


def _compare(arm: ArmMachine, processor: str, model: str, load_format: LoadFormat, dtype: str) -> None:
    command = ["-m", "tests.unit.compute.native_greedy", model, load_format, dtype]
    found, expected = json.loads(arm.python(*command, processor=processor)), greedy(model, load_format, dtype)
    assert found["kernels"] == BEST[processor]
    assert found["tokens"] == expected["tokens"]
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=TOLERANCE[dtype])


def test_conversions_of_kv_on_arm(arm: ArmMachine) -> None:
    """C++ gives the bits of numpy on ARM too. With float16, numpy keeps other bits of a NaN there than on x86."""
    file = Path("tests") / "unit" / "move" / "test_recoding.py"
    options = ("-q", "-c", os.devnull, "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider")
    shown = arm.python("-m", "pytest", *options, "-k", "64 and not float16", str(file))
    assert " passed" in shown
