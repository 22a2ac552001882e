"""The results of benchmarks are kept where git is missing, and where a later part fails."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.dummies import SHAPES

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the programs of `benchmarks/` importable."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def gpu_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, with a model that cannot be measured."""
    import gpu_model

    def measure(name: str, *_: object) -> dict[str, dict[str, float]]:
        if name == "deepseek-v2-lite":
            raise MemoryError(name)
        return {"decode 1 x 24": {"baton_s": 0.5}}

    monkeypatch.setattr(gpu_model, "measure", measure)
    return gpu_model


def test_a_result_without_git_has_an_empty_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import record

    monkeypatch.setenv("PATH", str(tmp_path))
    record.write("some", {"figure": 1}, tmp_path)
    stored = json.loads((tmp_path / "some.json").read_text())
    assert (stored["environment"]["commit"], stored["figure"]) == ("", 1)


def test_the_command_of_a_result_does_not_name_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import record

    monkeypatch.setenv("HOME", str(tmp_path))
    program = str(ROOT / "benchmarks" / "engines.py")
    monkeypatch.setattr("sys.argv", [program, "--peers", str(tmp_path / "peers"), "--batch", "1"])
    monkeypatch.chdir(ROOT)
    result = json.loads(record.store("any", {}, tmp_path))
    assert result["command"] == "python benchmarks/engines.py --peers ~/peers --batch 1"


def test_a_model_that_fails_leaves_the_figures_of_those_before(gpu_model: ModuleType, tmp_path: Path) -> None:
    from _gpu import Budget, Ceilings

    models = [SHAPES / name for name in ("llama-3.1-8b", "deepseek-v2-lite")]
    with pytest.raises(MemoryError):
        gpu_model.measure_models(models, gpu_model.REHEARSED, Ceilings(1.0, 1.0), Budget(1e6), CPU, tmp_path)
    assert json.loads((tmp_path / "gpu-model.json").read_text())["llama-3.1-8b"] == {"decode 1 x 24": {"baton_s": 0.5}}


def test_a_model_whose_load_would_exceed_the_time_is_left_out(gpu_model: ModuleType, tmp_path: Path) -> None:
    """An 8B model takes 16 GB, which load in 32 s; one of 30B takes 61 GB."""
    from _gpu import Budget, Ceilings

    models = [SHAPES / name for name in ("llama-3.1-8b", "qwen3-30b-a3b")]
    budget = Budget(1e6, _began_s=time.perf_counter() - 1e6 + 80)
    gpu_model.measure_models(models, gpu_model.REHEARSED, Ceilings(1.0, 1.0), budget, CPU, tmp_path)
    stored = json.loads((tmp_path / "gpu-model.json").read_text())
    assert stored["left_out_for_time"] == ["qwen3-30b-a3b"]
    assert "llama-3.1-8b" in stored
