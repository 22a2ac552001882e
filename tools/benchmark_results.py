"""Read result files of benchmarks/results, and write their figures and their origin as Markdown."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from docgen import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
SCRIPT = re.compile(r"benchmarks(?:/[\w/]+\.py|\.\w+)")


def load(name: str) -> dict[str, Any]:
    """Return a result, empty where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def scripts(command: str) -> list[Path]:
    """Return the programs that a command names."""
    names = [name if name.endswith(".py") else name.replace(".", "/") + ".py" for name in SCRIPT.findall(command)]
    return [ROOT / name for name in names]


def is_stale(name: str) -> bool:
    """A result is stale when it is gone, or when a program that made it is."""
    result = load(name)
    return not result or not all(path.exists() for path in scripts(result.get("command", "")))


def machine(environment: dict[str, Any]) -> str:
    return f"{environment['cores']} cores of {environment['cpu']}"


def usual_machine() -> str:
    """Return the machine of most results: it is named once, at the head of the page."""
    places = [load(path.stem).get("environment") for path in sorted(RESULTS.glob("*.json"))]
    return Counter(machine(place) for place in places if place).most_common(1)[0][0]


def origin(name: str, *, short: bool = False) -> str:
    """Return the line below a table: command, commit, date, machine and result file. `short`: simulated, no machine."""
    result = load(name)
    where = result.get("environment", {})
    parts = [f"`{result['command']}`"] if "command" in result else []
    if where.get("commit"):
        parts.append(where["commit"])
    if where and not short:
        parts.append(where["date"].split()[0])
        parts += [machine(where)] if machine(where) != usual_machine() else []
        parts.append(f"load={where['load_before']:.1f}")
    return f"{', '.join(parts)} ([{name}.json](../benchmarks/results/{name}.json))".lstrip()


def section(title: str, names: str, heads: list[str], rows: list[list[str]], note: str = "") -> list[str]:
    """Return a heading, a note, a table and its origins. `names`: the result files, with blanks between them."""
    origins = "; ".join(origin(name) for name in names.split())
    return [f"### {title}", "", *([note, ""] if note else []), table(heads, rows), "", origins, ""]


def ms(time_s: float) -> str:
    value = time_s * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def percent(ratio: float, digits: int = 0) -> str:
    return f"{ratio * 100:.{digits}f}%"


def signed(ratio: float) -> str:
    return f"{ratio * 100:+.1f}%"


def triple(values: dict[str, float], scale: float = 1.0, form: str = ".2f") -> list[str]:
    """Return mean, p90 and p99 of a distribution."""
    return [f"{values[key] * scale:{form}}" for key in ("mean", "p90", "p99")]
