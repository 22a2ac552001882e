"""Run every check, then the tests: `check.py [lint] [tests] [pytest arguments]`. Stops at no failure, forgets none.

A check that passes takes one line; one that fails shows all it says. The last line of a run with tests is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Check:
    """A command that must end with code 0."""

    name: str
    command: tuple[str, ...]


CHECKS = (
    Check("ruff check", (str(BIN / "ruff"), "check", "--quiet", ".")),
    Check("ruff format", (str(BIN / "ruff"), "format", "--check", "--quiet", ".")),
    Check("import contracts", (str(BIN / "lint-imports"), "--no-logo")),
    Check("tidy", (sys.executable, "tools/tidy.py")),
)
PYRIGHT = Check("pyright", (str(BIN / "pyright"), "--warnings"))


def environment() -> dict[str, str]:
    """Ours, without pyright's advice to install a newer pyright."""
    return dict(os.environ, PYRIGHT_PYTHON_IGNORE_WARNINGS="1")


def passes(check: Check) -> bool:
    done = subprocess.run(
        check.command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {check.name}", flush=True)
    if done.returncode != 0:
        print(done.stdout.strip() or f"(no output; exit code {done.returncode})", flush=True)
    return done.returncode == 0


def pyright_passes(*, ci: bool) -> bool:
    """Check types. Where pyright cannot start (it needs node), say so loudly; in CI that is a failure."""
    probe = subprocess.run(
        [PYRIGHT.command[0], "--version"], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    if probe.returncode == 0:
        return passes(PYRIGHT)
    print(f"{'FAILED' if ci else 'NOT RUN'} pyright cannot start: TYPES WERE NOT CHECKED", flush=True)
    print("       It needs node: put one on PATH, or run `.venv/bin/pip install -e .[node]`. It said:", flush=True)
    print("       " + ((probe.stderr or probe.stdout).strip().splitlines() or ["(nothing)"])[-1], flush=True)
    return not ci


def lint(*, ci: bool) -> list[str]:
    """Run every check; return the names of those that failed."""
    failed = [check.name for check in CHECKS if not passes(check)]
    return failed if pyright_passes(ci=ci) else [*failed, PYRIGHT.name]


def main(arguments: list[str]) -> int:
    ci = os.environ.get("CI", "").lower() in ("1", "true", "yes")
    failed = lint(ci=ci) if "lint" in arguments else []
    if failed:
        print(f"LINT FAILED: {', '.join(failed)}", flush=True)
    code = 0
    if "tests" in arguments:
        rest = [argument for argument in arguments if argument not in ("lint", "tests")]
        code = subprocess.run([sys.executable, "-m", "pytest", *rest], cwd=ROOT, check=False).returncode
    return 1 if failed else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
