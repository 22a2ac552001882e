"""Code, documentation and blank lines are told apart, and packages stay within their budgets."""

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


def test_a_budget_goes_up_only_with_a_reason() -> None:
    """A package that is new may take its lines from others; a sum that grows is a raise."""
    assert size.raises({"a": 10, "b": 5}, {"a": 9, "b": 5}) == []
    assert size.raises({"a": 10, "b": 5}, {"a": 11, "b": 4}) == ["a"]
    assert size.raises({"a": 10}, {"a": 6, "new": 4}) == []
    assert size.raises({"a": 10}, {"a": 10, "new": 4}) == ["the sum of all packages"]
    assert size.REASON.search("why\n\nbudget: a new port needs it")
    assert not size.REASON.search("the budget: grows")


def test_a_budget_with_room_should_be_lowered() -> None:
    assert size.notes({"a": size.Lines(code=99)}, {"a": 100}) == []
    assert "lower it" in size.notes({"a": size.Lines(code=98)}, {"a": 100})[0]
    assert "has no budget" in size.problems({"a": size.Lines(code=1)}, {})[0]
    assert "budget 0" in size.problems({"a": size.Lines(code=1)}, {"a": 0})[0]


def test_every_raise_of_a_budget_is_explained(root: Path) -> None:
    assert size.unexplained_raises(root) == []


def test_every_package_is_within_its_budget(root: Path) -> None:
    assert size.problems(size.packages(root), json.loads((root / size.BUDGET_FILE).read_text())) == []
