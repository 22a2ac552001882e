"""Count lines per package of src/baton against a budget: code, documentation (docstrings and comments), blank.

    size.py            print the table and the problems
    size.py --check    also fail where a package is over its budget, or a commit raised one and gave no reason
    size.py --lower    lower every budget to the lines that its package has

tools/size_budget.json is a ratchet: it only goes down, except in a commit whose message has a line "budget: REASON".
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET_FILE = "tools/size_budget.json"
SLACK_RATIO = 0.01
"""A package that is further below its budget should lower it."""
SINCE = "tools/tidy_commits.py"
"""The commit that added this file is the first one whose budgets are compared."""
REASON = re.compile(r"^budget: \S+ \S+", re.MULTILINE)
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
    """Return the packages that are over their budget, or that have none."""
    found = []
    for name, lines in counted.items():
        if name not in budgets:
            found.append(f"{name} has no budget: add a line to {BUDGET_FILE}")
        elif lines.code > budgets[name]:
            found.append(
                f"{name} has {lines.code} lines of code, budget {budgets[name]}: remove some, or raise the budget in "
                f"{BUDGET_FILE} in a commit with a line `budget: REASON`"
            )
    return found


def notes(counted: dict[str, Lines], budgets: dict[str, int]) -> list[str]:
    """Return the packages whose budget can be lowered."""
    return [
        f"{name} has {lines.code} lines of code, budget {budgets[name]}: lower it with `python tools/size.py --lower`"
        for name, lines in counted.items()
        if name in budgets and lines.code < (1 - SLACK_RATIO) * budgets[name]
    ]


def raises(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the packages whose budget went up. A package that is new takes its lines from others: the sum counts."""
    up = [name for name, lines in after.items() if lines > before.get(name, lines)]
    return up if up or sum(after.values()) <= sum(before.values()) else ["the sum of all packages"]


def unexplained_raises(root: Path) -> list[str]:
    """Return the commits that raised a budget without a reason; empty where there is no history."""
    added = _git(root, "log", "--diff-filter=A", "--format=%H", "--", SINCE).split()
    if not added or _git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        return []
    found = []
    for commit in _git(root, "log", "--format=%H", f"{added[-1]}..HEAD", "--", BUDGET_FILE).split():
        before, after = (_git(root, "show", f"{revision}:{BUDGET_FILE}") for revision in (f"{commit}^", commit))
        up = raises(json.loads(before), json.loads(after)) if before and after else []
        if up and not REASON.search(_git(root, "log", "-1", "--format=%b", commit)):
            found.append(f"commit {commit[:12]} raised the budget of {', '.join(up)} without a line `budget: REASON`")
    return found


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints; empty where there is no git, no repository or no such thing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def main(arguments: list[str]) -> int:
    budgets: dict[str, int] = json.loads((ROOT / BUDGET_FILE).read_text())
    counted = packages(ROOT)
    if "--lower" in arguments:
        budgets = {name: min(lines, counted[name].code) for name, lines in budgets.items() if name in counted}
        (ROOT / BUDGET_FILE).write_text(json.dumps(budgets, indent=2) + "\n")
    print(f"{'package':<12}{'code':>8}{'doc':>8}{'blank':>8}{'total':>8}{'budget':>8}")
    for name, lines in counted.items():
        print(row(name, lines, budgets.get(name)))
    print(row("src/baton", sum(counted.values(), Lines()), sum(budgets.values())))
    for name in OTHER_FOLDERS:
        if (ROOT / name).is_dir():
            print(row(name, count_folder(ROOT / name), None))
    found = [*problems(counted, budgets), *unexplained_raises(ROOT)]
    for line in [*found, *(f"note: {note}" for note in notes(counted, budgets))]:
        print(line)
    return 1 if found and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
