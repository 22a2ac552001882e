"""Lines are counted as a reader would, and packages stay within their budgets."""

from __future__ import annotations

import json
from pathlib import Path

import size

SOURCE = '''"""What it is for.

Why."""

# a comment
x = 1  # behind code


class A:
    y: int = 0
    """What y is."""
'''


def test_docstrings_and_comments_are_documentation() -> None:
    """5 lines of words (the blank one inside the docstring counts with it), 3 of code, 3 blank."""
    assert size.count(SOURCE) == size.Lines(code=3, doc=5, blank=3)


def test_every_package_is_within_its_budget(root: Path) -> None:
    assert size.problems(size.packages(root), json.loads((root / size.BUDGET_FILE).read_text())) == []
