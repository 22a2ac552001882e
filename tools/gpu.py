"""Run the tests and benchmarks that need CUDA, within eight minutes, and print what ran.

`make setup` is not needed before: a Python with PyTorch and CUDA is enough, because Baton runs from its source, and
further packages come from .gpu-pack (`make gpu-pack`). The first usable Python is taken: the one that runs this file,
then .venv's. Results go to the folder $OUT if it is set, else to benchmarks/results.

Exit code: 0 if all parts passed, or the machine has no NVIDIA driver. 1 if a part failed, ran nothing, or was left out
for lack of time. `--rehearse` runs the same parts in small sizes on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_pack import PACK, unpack

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 480.0
TESTS_S_MAX = 240.0
TEST_S_MAX = 90.0
"""A test that takes longer fails, and the next one begins."""
SERVER_START_S = 80.0
"""A test that waits longer for a server fails with the server's output."""
LAST_TEST_S = 30.0
"""No test begins in this part of the time of all tests."""
END_S = 10.0
"""Time in which an interrupted part ends: pytest writes its report."""
PART_S_MIN = 20.0
"""A part is left out if less time than this is left. An earlier part is interrupted before."""
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: the driver's library is installed, and there is no GPU."""
PYTEST_OPTIONS = ("-p", "no:cacheprovider", "-p", "pytest_timeout", "-W", "default")
"""Plugins by name, because ENVIRONMENT keeps the machine's out. A warning of one of its libraries fails no test."""
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "BATON_TESTS_START_S": str(SERVER_START_S),
}
"""Variables of every part."""
PROBE = """
import importlib.util, sys
needed = ("torch", "msgspec", "starlette", "pytest", "pytest_timeout")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit("it has no " + ", ".join(missing) + "; make gpu-pack fetches what is missing, except for torch")
import torch
if sys.argv[1] == "cpu":
    print(f"torch {torch.__version__} on the CPU, to rehearse")
elif torch.cuda.is_available():
    print(f"torch {torch.__version__}, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
else:
    sys.exit(f"its torch {torch.__version__} finds no CUDA device")
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one part of the run."""

    part: str
    result: str
    """passed, failed, ran nothing, or left out."""
    spent_s: float
    detail: str = ""


def has_driver(library: str, node: Path) -> bool:
    """Return whether an NVIDIA driver with a device is present. A driver that does not start counts.

    node: the driver's control device. It shows a driver whose library is not where the loader searches.
    """
    try:
        dll = ctypes.CDLL(library)
    except OSError:
        return node.exists()
    return dll.cuInit(ctypes.c_uint(0)) != NO_DEVICE


def usable(python: str, environment: dict[str, str], *, rehearse: bool) -> bool:
    """Print what this Python has, or what it lacks."""
    if not Path(python).exists():
        return False
    command = [python, "-c", PROBE, "cpu" if rehearse else "cuda"]
    probe = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = (probe.stdout if probe.returncode == 0 else probe.stderr).strip().splitlines()
    print(f"gpu: {python}: {lines[-1] if lines else 'it printed nothing'}", flush=True)
    return probe.returncode == 0


def run_part(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[int | None, float]:
    """Run a command. Return its exit code (None: it ran out of time) and its seconds.

    It is interrupted END_S before the limit, and killed at the limit. So are its children.
    """
    end_s = min(END_S, limit_s / 4)
    print("gpu: $ " + " ".join(command), flush=True)
    began_s = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    code: int | None = None
    try:
        code = process.wait(limit_s - end_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(end_s)
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, time.perf_counter() - began_s


def outcome_of(part: str, code: int | None, spent_s: float, ran: str) -> Outcome:
    """Return the outcome of a part. `code`: its exit code, None if it ran out of time. `ran`: its results, if any."""
    if code is None:
        return Outcome(part, "failed", spent_s, "it ran out of time. " + ran)
    if not ran:
        return Outcome(part, "ran nothing", spent_s, f"exit code {code}")
    return Outcome(part, "failed" if code else "passed", spent_s, ran)


def tests_ran(report: Path) -> str:
    """Return the counts of pytest's report as text. Empty: the report is missing, or every test was skipped."""
    if not report.exists():
        return ""
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for key in counts:
            counts[key] += int(suite.get(key, 0))
    ran = counts["tests"] - counts["skipped"]
    failed = counts["failures"] + counts["errors"]
    return f"{ran} tests ran, {failed} failed, {counts['skipped']} skipped" if ran else ""


def succeeded(outcomes: Sequence[Outcome]) -> bool:
    """Return whether every part ran and passed."""
    return all(each.result == "passed" for each in outcomes)


def written_s(file: Path) -> float:
    """Return the time at which a file was written. 0: the file does not exist."""
    return file.stat().st_mtime if file.exists() else 0.0


def figures_of(file: Path, before_s: float) -> str:
    """Return a result file's name and the parts that it left out. Empty: the file was not written since `before_s`."""
    if written_s(file) == before_s:
        return ""
    left_out = json.loads(file.read_text()).get("left_out_for_time", [])
    return f"{file.name}; left out for time: {', '.join(left_out)}" if left_out else file.name


def run_all(python: str, environment: dict[str, str], folder: Path, budget_s: float, extra: list[str]) -> list[Outcome]:
    """Run the tests, then every benchmark while time is left."""
    ends_s = time.perf_counter() + budget_s
    report = folder / "gpu-tests.xml"
    report.unlink(missing_ok=True)
    limit_s = min(TESTS_S_MAX, budget_s)
    command = [python, "-m", "pytest", "tests/gpu", "-m", "gpu", f"--junitxml={report}", *PYTEST_OPTIONS]
    command += [f"--timeout={TEST_S_MAX:.0f}", f"--session-timeout={max(1.0, limit_s - LAST_TEST_S):.0f}", *extra]
    code, spent_s = run_part(command, environment, limit_s)
    outcomes = [outcome_of("tests", code, spent_s, tests_ran(report))]
    paths = sorted((ROOT / "benchmarks").glob("gpu_*.py"))
    for index, path in enumerate(paths):
        left_s = ends_s - time.perf_counter()
        if left_s < PART_S_MIN:
            outcomes.append(Outcome(path.stem, "left out", 0.0, "no time was left"))
            continue
        later = len(paths) - index - 1
        share_s = left_s / (later + 1)  # a fast part leaves its time to the later ones
        results = folder / f"{path.stem.replace('_', '-')}.json"
        before_s = written_s(results)
        command = [python, str(path), "--seconds", f"{share_s * 0.8:.0f}", "--out", str(folder), *extra]
        code, spent_s = run_part(command, environment, max(PART_S_MIN, left_s - later * (PART_S_MIN + 1.0)))
        outcomes.append(outcome_of(path.stem, code, spent_s, figures_of(results, before_s)))
    return outcomes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--library", default="libcuda.so.1", help="the driver's")
    parser.add_argument("--node", type=Path, default=Path("/dev/nvidiactl"), help="the driver's control device")
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--rehearse", action="store_true", help="the same parts on the CPU, in small sizes")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if not args.rehearse and not has_driver(args.library, args.node):
        print("gpu: nothing was run: this machine has no NVIDIA driver")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary) / "site"
        unpack(args.pack, site)
        default = temporary if args.rehearse else str(ROOT / "benchmarks" / "results")
        folder = Path(os.environ.get("OUT") or default)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [str(site), str(ROOT / "src"), str(ROOT)]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"TRITON_INTERPRET": "1"} if args.rehearse else {}
        candidates = [sys.executable, str(ROOT / ".venv" / "bin" / "python")]
        python = next((each for each in candidates if usable(each, environment, rehearse=args.rehearse)), None)
        if python is None:
            print("gpu: FAILED: a driver is present, and no Python can use it: the lines above name what is missing")
            return 1
        extra = ["--rehearse"] if args.rehearse else []
        outcomes = run_all(python, environment, folder, args.budget_s, extra)
        (folder / "gpu-run.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=2) + "\n")
    print("\ngpu: part, result, seconds, detail")
    for each in outcomes:
        print(f"gpu: {each.part:<16} {each.result:<12} {each.spent_s:7.1f}  {each.detail}")
    return 0 if succeeded(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
