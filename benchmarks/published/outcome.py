"""What the scripts of this folder share: where clusters and traces are, and how an outcome is stored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from record import write  # noqa: E402  the benchmarks' own, one folder up

CLUSTERS = HERE.parent.parent / "examples" / "clusters"
TRACES = HERE.parent.parent.parent / "shared" / "traces"
"""Where the traces lie unless a script is told otherwise."""


def store(name: str, figures: dict[str, Any]) -> None:
    """Write benchmarks/results/published-NAME.json, and show it."""
    write(f"published-{name}", figures)
