"""The structural measures: a walk is put together from call stacks, and the record is what the document shows."""

from __future__ import annotations

import json
from pathlib import Path

import structure
import walk
from docgen import compact

EDGE, FIRST = ("serve/edge.py", "run"), walk.FIRST


def test_a_walk_goes_back_to_the_common_frame() -> None:
    """The driver calls the coordinator and then the worker: one return to the driver, four files."""
    driver = ("serve/driver.py", "take")
    noted = [
        (0.0, [("serve/driver.py", "idle"), ("decide/coordinator.py", "handle")]),
        (1.0, [EDGE, FIRST]),
        (2.0, [EDGE, FIRST, driver, ("decide/coordinator.py", "decide")]),
        (3.0, [EDGE, FIRST, driver, ("compute/engine.py", walk.LAST)]),
    ]
    path = walk.walk(noted)
    assert path == [
        "serve/edge.py",
        walk.FIRST[0],
        "serve/driver.py",
        "decide/coordinator.py",
        "serve/driver.py",
        "compute/engine.py",
    ]
    assert walk.hops(path) == (5, 1)


def test_the_record_stands_at_the_end_of_the_architecture_page(root: Path) -> None:
    record = json.loads(structure.RECORD.read_text())
    assert compact(structure.render(record)) in (root / "docs" / "architecture.md").read_text()
    assert set(structure.NAMES) <= set(record)


def test_a_measure_that_has_moved_is_told() -> None:
    record = dict.fromkeys(structure.NAMES, 100.0)
    assert structure.check(record, {"lines": 104.0}) == []
    assert "recorded 100" in structure.check(record, {"lines": 106.0})[0]


def test_cells_are_written_without_blanks() -> None:
    assert compact("| a | b \\| c |\n| --- | --- |\ntext | text") == "|a|b \\| c|\n|---|---|\ntext | text"
