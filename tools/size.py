"""Count lines per package of src/baton, against a budget: code, documentation (docstrings and comments), blank.

`size.py --check` fails where a package has more lines of code than tools/size_budget.json grants. Raising a budget is
a line in that file, so that it shows in the change that needs it.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET_FILE = "tools/size_budget.json"
OTHER_FOLDERS = ("tests", "tools", "benchmarks", "examples")


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of some Python text, each counted once."""

    code: int = 0
    doc: int = 0
    blank: int = 0

    def __add__(self, other: Lines) -> Lines:
        return Lines(self.code + other.code, self.doc + other.doc, self.blank + other.blank)

    @property
    def total(self) -> int:
        return self.code + self.doc + self.blank


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of docstrings, attribute docstrings included: every statement that is nothing but a string."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def count(text: str) -> Lines:
    """Count the lines of one module. A comment behind code belongs to the code."""
    rows = text.splitlines()
    documented = docstring_lines(ast.parse(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and rows[token.start[0] - 1].lstrip().startswith("#"):
            documented.add(token.start[0])
    blank = sum(not row.strip() and number not in documented for number, row in enumerate(rows, start=1))
    return Lines(code=len(rows) - len(documented) - blank, doc=len(documented), blank=blank)


def count_folder(folder: Path) -> Lines:
    total = Lines()
    for path in sorted(folder.rglob("*.py")):
        total += count(path.read_text(encoding="utf-8"))
    return total


def packages(root: Path) -> dict[str, Lines]:
    """Lines of each package of src/baton that has any, in alphabetical order."""
    folders = sorted(path for path in (root / "src" / "baton").iterdir() if path.is_dir() and path.name[0] not in "_.")
    counted = {folder.name: count_folder(folder) for folder in folders}
    return {name: lines for name, lines in counted.items() if lines.total}


def row(name: str, lines: Lines, budget_lines: int | None) -> str:
    figures = f"{name:<12}{lines.code:>8}{lines.doc:>8}{lines.blank:>8}{lines.total:>8}"
    if budget_lines is None:
        return figures
    return f"{figures}{budget_lines:>8}{'  OVER' if lines.code > budget_lines else ''}"


def problems(counted: dict[str, Lines], budgets: dict[str, int]) -> list[str]:
    """Say which package outgrew its budget, or has none."""
    found = []
    for name, lines in counted.items():
        if name not in budgets:
            found.append(f"{name} has no budget: add a line to {BUDGET_FILE}")
        elif lines.code > budgets[name]:
            found.append(
                f"{name} has {lines.code} lines of code, budget {budgets[name]}: remove some, or raise the budget in "
                f"{BUDGET_FILE} and say why in the commit"
            )
    return found


def main(arguments: list[str]) -> int:
    budgets: dict[str, int] = json.loads((ROOT / BUDGET_FILE).read_text())
    counted = packages(ROOT)
    print(f"{'package':<12}{'code':>8}{'doc':>8}{'blank':>8}{'total':>8}{'budget':>8}")
    for name, lines in counted.items():
        print(row(name, lines, budgets.get(name)))
    print(row("src/baton", sum(counted.values(), Lines()), sum(budgets.values())))
    for name in OTHER_FOLDERS:
        if (ROOT / name).is_dir():
            print(row(name, count_folder(ROOT / name), None))
    found = problems(counted, budgets)
    for problem in found:
        print(problem)
    return 1 if found and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
