"""What every result file says about itself: when, where, with which versions, by which command."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from baton.move.clock import utc_date

RESULTS = Path(__file__).parent / "results"

VERSIONS = ("torch", "triton", "numpy", "msgspec", "uvicorn", "tokenizers")


def environment() -> dict[str, Any]:
    """Describe the machine and the versions."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "date": utc_date().strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONS if (version := _version(name))},
    }


def _commit() -> str:
    """Return the short hash of the commit that is checked out. Empty: there is no git, or no repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _version(name: str) -> str:
    """Return the version of an installed package. Empty: it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def write(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> None:
    """Store a result and show it."""
    print(store(name, figures, folder))


def store(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> str:
    """Store a result, in place of the one of an earlier call. Return its text."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"command": "python " + " ".join([*map(_relative, sys.argv)]), "environment": environment(), **figures}
    text = json.dumps(record, indent=2)
    (folder / f"{name}.json").write_text(text + "\n")
    return text


def earlier(name: str, parts: Iterable[str]) -> dict[str, Any]:
    """Read what a result file has of these parts: a run of one of them leaves the others'."""
    file = RESULTS / f"{name}.json"
    figures = json.loads(file.read_text()) if file.exists() else {}
    return {part: figures[part] for part in parts if part in figures}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table as the documents have it."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _relative(argument: str) -> str:
    """Name a program by its path in this repository, and what lies in the user's home folder from `~` on."""
    path, home = Path(argument).resolve(), Path.home()
    if path.suffix == ".py" and path.exists() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(Path("~") / Path(argument).relative_to(home)) if argument.startswith(f"{home}/") else argument


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and the quartiles that say how far to trust it."""
    ordered = sorted(values)
    quarters = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    return {"median": statistics.median(ordered), "q1": quarters[0], "q3": quarters[2], "runs": len(ordered)}
