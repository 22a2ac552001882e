"""Measure the structure of src/baton: files, lines, functions, packages, and the walk of a request.

structure.py           print the measures beside the recorded ones
structure.py --walk    also trace a request (ten seconds)
structure.py --write   record them in tools/structure.json and at the end of docs/architecture.md
structure.py --check   fail where the document is not what is recorded, or the record is more than 5 % off
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from docgen import publish_block, table
from size import ROOT, count
from walk import hops, stacks, walk

RECORD = ROOT / "tools" / "structure.json"
SOURCE = ROOT / "src" / "baton"
SLOW_TEST = re.compile(r"^ +(\d+\.\d) s  (tests/\S+)", re.MULTILINE)
"""A line of the table with which a run of the suite ends."""
TOLERANCE_RATIO = 0.05
Function = ast.FunctionDef | ast.AsyncFunctionDef
NAMES = {
    "files": "Python files in `src`",
    "files_under_60_lines": "of them below 60 lines",
    "lines": "lines in them",
    "code_lines": "of them code",
    "native_lines": "lines of C++",
    "packages": "packages (folders with modules)",
    "classes": "classes",
    "functions": "functions",
    "function_lines_median": "lines of a function, median",
    "function_lines_p90": "90th percentile",
    "function_lines_max": "maximum",
    "docstring_ratio": "functions with a docstring",
    "walk_files": "files on a request's walk, HTTP handler to engine step (`tools/walk.py`)",
    "walk_returns": "returns to a file already left on that walk",
}


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def measure() -> dict[str, float]:
    """Return the measures that take no run."""
    texts = {path: path.read_text(encoding="utf-8") for path in sources()}
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, Function)]
    sizes = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    native = [path for kind in ("*.cpp", "*.h") for path in SOURCE.rglob(kind)]
    line_counts = [len(text.splitlines()) for text in texts.values()]
    return {
        "files": len(texts),
        "files_under_60_lines": sum(lines < 60 for lines in line_counts),
        "lines": sum(line_counts),
        "code_lines": sum(count(text).code for text in texts.values()),
        "native_lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in native),
        "packages": len({path.parent for path in texts}),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "functions": len(sizes),
        "function_lines_median": statistics.median(sizes),
        "function_lines_p90": sizes[int(len(sizes) * 0.9)],
        "function_lines_max": sizes[-1],
        "docstring_ratio": round(sum(ast.get_docstring(node) is not None for node in functions) / len(sizes), 3),
    }


def shown(name: str, value: float) -> str:
    return f"{value * 100:.0f} %" if name.endswith("_ratio") else f"{value:,.0f}"


def render(record: dict[str, Any]) -> str:
    """Return the table of docs/architecture.md."""
    rows = [[NAMES[name], shown(name, record[name])] for name in NAMES if name in record]
    rows += [
        [f"slow test: `{name}`", f"{seconds:.1f} s"] for name, seconds in record.get("slowest_tests_s", {}).items()
    ]
    return table(["Measure", "Value"], rows)


def publish(record: dict[str, Any], arguments: list[str]) -> int:
    return publish_block("docs/architecture.md", "structure.py", lambda: render(record), arguments)


def check(record: dict[str, Any], now: dict[str, float]) -> list[str]:
    """Return the measures that are further from the record than the tolerance."""
    return [
        f"{NAMES[name]}: {shown(name, value)}, recorded {shown(name, record[name])}: run `tools/structure.py --write`"
        for name, value in now.items()
        if abs(value - record[name]) > TOLERANCE_RATIO * max(record[name], 1)
    ]


def main(arguments: list[str]) -> int:
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    now: dict[str, Any] = dict(measure())
    if "--check" in arguments:
        problems = check(record, now)
        print("\n".join(problems), end="\n" if problems else "")
        return publish(record, ["--check"]) | bool(problems)
    if "--walk" in arguments:
        path = walk(stacks())
        now["walk_files"], now["walk_returns"] = hops(path)
        print(" > ".join(path))
    if "--suite" in arguments:
        output = Path(arguments[arguments.index("--suite") + 1]).read_text()
        now["slowest_tests_s"] = {name: float(seconds) for seconds, name in SLOW_TEST.findall(output)}
    for name, text in NAMES.items():
        old = shown(name, record[name]) if name in record else ""
        print(f"{text:<75}{shown(name, now[name]) if name in now else '':>10}{old:>10}")
    if "--write" in arguments:
        record |= now
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
        return publish(record, [])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
