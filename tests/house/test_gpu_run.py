"""`make gpu` never passes on a machine with a driver where nothing ran, and its pack holds what Baton imports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import gpu
import gpu_pack
import pytest

from tests.fake_cuda import build

SOME_TESTS = """
import signal, warnings
import pytest

pytestmark = pytest.mark.gpu

def test_that_passes(pytestconfig):
    assert not pytestconfig.pluginmanager.hasplugin("xdist")

def test_that_hangs():
    signal.pause()

def test_that_warns():
    warnings.warn("this machine has an old library", DeprecationWarning)
"""
WRITES_AT_INTERRUPT = """
try:
    import signal
    signal.pause()
except KeyboardInterrupt:
    import pathlib, sys
    pathlib.Path(sys.argv[1]).touch()
"""


def run_gpu(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_machine_without_a_driver_passes_and_says_so(root: Path, tmp_path: Path) -> None:
    done = run_gpu(root, "--library", str(tmp_path / "none.so"), "--node", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (0, "gpu: nothing was run: this machine has no NVIDIA driver\n")


def test_a_driver_that_no_python_can_use_is_a_failure(root: Path, tmp_path: Path) -> None:
    """torch is a build for CPUs here. The output names what is missing."""
    done = run_gpu(root, "--library", build(tmp_path), "--pack", str(tmp_path / "empty"))
    assert done.returncode == 1
    assert "finds no CUDA device" in done.stdout
    assert "FAILED: a driver is present" in done.stdout


def test_a_driver_whose_library_is_not_found_is_a_driver(root: Path, tmp_path: Path) -> None:
    """The machine has the control device of the driver."""
    done = run_gpu(root, "--library", str(tmp_path / "none.so"), "--node", str(tmp_path), "--pack", str(tmp_path))
    assert done.returncode == 1
    assert "FAILED: a driver is present" in done.stdout


@pytest.mark.parametrize(
    ("code", "ran", "result"),
    [(0, "", "ran nothing"), (5, "", "ran nothing"), (0, "3 tests ran", "passed"), (1, "3 tests ran", "failed"),
     (None, "3 tests ran", "failed")],
)  # fmt: skip
def test_a_part_passes_only_if_it_ran(code: int | None, ran: str, result: str) -> None:
    assert gpu.outcome_of("tests", code, 1.0, ran).result == result


@pytest.mark.parametrize("result", ["failed", "ran nothing", "left out"])
def test_a_run_passes_only_if_every_part_did(result: str) -> None:
    outcomes = [gpu.Outcome("tests", "passed", 1.0), gpu.Outcome("gpu_model", result, 1.0)]
    assert gpu.succeeded(outcomes[:1])
    assert not gpu.succeeded(outcomes)


def test_a_test_that_hangs_fails_alone(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report counts all tests. Neither warnings nor plugins of the machine's other packages fail any."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_some.py").write_text(SOME_TESTS)
    shutil.copy(root / "pyproject.toml", tmp_path)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "TEST_S_MAX", 2.0)
    (outcome,) = gpu.run_all(sys.executable, {**os.environ, **gpu.ENVIRONMENT}, tmp_path, 60.0, [])
    assert (outcome.result, outcome.detail) == ("failed", "3 tests ran, 1 failed, 0 skipped")


def test_skipped_tests_did_not_run(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert gpu.tests_ran(report) == ""
    for skipped, words in ((22, ""), (8, "14 tests ran, 2 failed, 8 skipped")):
        report.write_text(
            f'<testsuites><testsuite tests="22" failures="1" errors="1" skipped="{skipped}"/></testsuites>'
        )
        assert gpu.tests_ran(report) == words


def test_only_a_result_of_this_run_counts(tmp_path: Path) -> None:
    file = tmp_path / "gpu-decode.json"
    assert gpu.figures_of(file, gpu.written_s(file)) == ""
    file.write_text(json.dumps({"left_out_for_time": ["b1_64k"]}))
    assert gpu.figures_of(file, 0) == "gpu-decode.json; left out for time: b1_64k"
    assert gpu.figures_of(file, gpu.written_s(file)) == ""


def test_a_part_that_runs_out_of_time_may_write_its_results(tmp_path: Path) -> None:
    code, _ = gpu.run_part([sys.executable, "-c", WRITES_AT_INTERRUPT, str(tmp_path / "results")], {}, 6.0)
    assert code is None
    assert (tmp_path / "results").exists()


def test_a_part_that_hangs_is_killed_with_its_children() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    code, _ = gpu.run_part([sys.executable, "-c", program], {}, 0.5)
    assert code is None


def test_a_pack_is_unpacked_with_the_version_of_baton(root: Path, tmp_path: Path) -> None:
    pack, site = tmp_path / "pack", tmp_path / "site"
    pack.mkdir()
    with zipfile.ZipFile(pack / "some-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some/__init__.py", "number = 1\n")
    gpu_pack.unpack(pack, site)
    assert (site / "some" / "__init__.py").is_file()
    (found,) = distributions(path=[str(site)])
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert (found.metadata["Name"], found.version) == (project["name"], project["version"])


def test_a_pack_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pack, "PACK_BYTES_MAX", 2 << 20)
    (tmp_path / "large-1.0-py3-none-any.whl").write_bytes(bytes(3 << 20))
    with pytest.raises(gpu_pack.PackError, match=r"takes 3 MiB, and 2 are allowed; remove names from gpu_pack.txt"):
        gpu_pack.check_size(tmp_path)


def test_the_pack_names_every_dependency_but_torch(root: Path) -> None:
    """A dependency that is missing there would break the run on the machine with the GPU, and nowhere else.

    SciPy, which plans and fits, would be larger than the rest of the pack allows, and no GPU test imports it.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = {_name(line) for line in project["dependencies"]} - {"torch", "scipy"}
    lines = (line for line in gpu_pack.NAMES.read_text().splitlines() if line and not line.startswith("#"))
    assert needed - {_name(line) for line in lines} == set()


def _name(requirement: str) -> str:
    return requirement.split(";")[0].split(">")[0].strip().lower().replace("_", "-")
