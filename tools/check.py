"""Run every check beside the tests: `check.py [lint] [tests] [pytest arguments]`. Stops at no failure, forgets none.

A check that passes takes one line; one that fails shows all it says. The last line of a run with tests is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PROCESSES_MAX = 8
"""A test may start a server with workers of its own."""


@dataclass(frozen=True, slots=True)
class Check:
    """A command that must end with code 0."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended. `lines` is what a person is shown."""

    name: str
    passed: bool
    lines: tuple[str, ...]


PYRIGHT = Check("pyright", (str(BIN / "pyright"), "--warnings"))
CHECKS = (
    Check("ruff check", (str(BIN / "ruff"), "check", "--quiet", ".")),
    Check("ruff format", (str(BIN / "ruff"), "format", "--check", "--quiet", ".")),
    Check("import contracts", (str(BIN / "lint-imports"), "--no-logo")),
    Check("tidy", (sys.executable, "tools/tidy.py", "--strict")),
    PYRIGHT,
)


def environment() -> dict[str, str]:
    """Ours, without pyright's advice to install a newer pyright."""
    return dict(os.environ, PYRIGHT_PYTHON_IGNORE_WARNINGS="1")


def tests_environment() -> dict[str, str]:
    """Return the environment of the tests.

    Bytecode is written: the tests start hundreds of processes, and each would compile Baton for half a second. A test
    process has one OpenMP thread, because more would spin on cores that others need.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def is_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def run(check: Check) -> Outcome:
    """Run a check to its end. Where pyright cannot start (it needs node), say so loudly; in CI that is a failure."""
    if check is PYRIGHT and (why := cannot_start(check)):
        lines = (
            f"{'FAILED' if is_ci() else 'NOT RUN'} pyright cannot start: TYPES WERE NOT CHECKED",
            "       It needs node: put one on PATH, or run `.venv/bin/pip install -e .[node]`. It said:",
            f"       {why}",
        )
        return Outcome(check.name, not is_ci(), lines)
    done = subprocess.run(
        check.command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode == 0:
        return Outcome(check.name, True, (f"ok     {check.name}",))
    said = done.stdout.strip() or f"(no output; exit code {done.returncode})"
    return Outcome(check.name, False, (f"FAILED {check.name}", said))


def cannot_start(check: Check) -> str:
    """Return the last line of what a command says that cannot even tell its version, or an empty string."""
    probe = subprocess.run(
        [check.command[0], "--version"], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    if probe.returncode == 0:
        return ""
    return ((probe.stderr or probe.stdout).strip().splitlines() or ["(nothing)"])[-1]


def report(outcomes: Iterable[Future[Outcome]]) -> bool:
    """Print the outcomes in their order, each when it is there. Return whether all checks passed."""
    failed: list[str] = []
    for outcome in (future.result() for future in outcomes):
        print("\n".join(outcome.lines), flush=True)
        failed += [] if outcome.passed else [outcome.name]
    if failed:
        print(f"LINT FAILED: {', '.join(failed)}", flush=True)
    return not failed


def pytest_command(arguments: list[str]) -> list[str]:
    """Return the command that runs the tests on all cores. One process runs the tests of a file.

    There are more processes than cores, because many tests wait: for processes that start and end, and for timeouts.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    processes = min(PROCESSES_MAX, cores + cores // 2)
    parallel = ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"] if processes > 1 else []
    return [sys.executable, "-m", "pytest", *parallel, *arguments]


def tests(command: list[str], outcomes: list[Future[Outcome]]) -> bool:
    """Run pytest and pass on what it prints; print the outcomes of the checks before its last line."""
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=tests_environment(), stdout=subprocess.PIPE, text=True, errors="replace"
    ) as pytest:
        assert pytest.stdout is not None
        for line in pytest.stdout:
            print(last, end="", flush=True)
            last = line
    passed = report(outcomes)
    print(last, end="", flush=True)
    return passed and pytest.returncode == 0


def main(arguments: list[str]) -> int:
    rest = [argument for argument in arguments if argument not in ("lint", "tests")]
    checks = CHECKS if "lint" in arguments else ()
    beside = 1 if "tests" in arguments else 2
    with ThreadPoolExecutor(beside) as pool:
        outcomes = [pool.submit(run, check) for check in checks]
        passed = tests(pytest_command(rest), outcomes) if "tests" in arguments else report(outcomes)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
