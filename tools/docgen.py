"""Write a generated page, or compare it: what the gen_*.py programs share."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN_LINES = 20


def cell(text: str) -> str:
    """Fit text into a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def publish(name: str, render: Callable[[], str], arguments: list[str]) -> int:
    """Write docs/`name`, or with --check say how it differs. Returns the exit code."""
    path = ROOT / "docs" / name
    wanted = render().rstrip("\n") + "\n"
    if "--check" not in arguments:
        path.write_text(wanted, encoding="utf-8")
        return 0
    present = path.read_text(encoding="utf-8") if path.exists() else ""
    if present == wanted:
        return 0
    print(f"docs/{name} is out of date: run `make docs` and commit it. The first differences:", file=sys.stderr)
    difference = difflib.unified_diff(present.splitlines(), wanted.splitlines(), "present", "wanted", lineterm="", n=0)
    for line in list(difference)[:SHOWN_LINES]:
        print("  " + line, file=sys.stderr)
    return 1
