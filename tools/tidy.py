"""Hold the code to style.md where a program can: sizes, names, units, refused constructs.

    tidy.py             check; prints `file:line: [rule] what, and what to do`
    tidy.py --shrink    check, and lower the ratchet to what is left

What was there before the ratchet stands in tools/tidy_baseline.json and may only shrink; what is right in spite of a
rule stands in tools/tidy_allow.toml with its reason. `--root FOLDER` checks another tree.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tidy_rules import SIZE_RULES, Finding, findings

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
ALLOW_FILE = "tools/tidy_allow.toml"
BASELINE_FILE = "tools/tidy_baseline.json"
ALLOW_KEYS = {"path", "rule", "name", "reason"}


@dataclass(frozen=True, slots=True)
class Allowed:
    """One entry of the allow-list."""

    path: str
    rule: str
    name: str | None

    def covers(self, finding: Finding) -> bool:
        inside = finding.path.startswith(self.path) if self.path.endswith("/") else finding.path == self.path
        return inside and finding.rule == self.rule and self.name in (None, finding.name)


def read_allowed(root: Path) -> tuple[list[Allowed], list[str]]:
    """Read the allow-list; return its entries, and what is wrong with them."""
    path = root / ALLOW_FILE
    entries = tomllib.loads(path.read_text()).get("allow", []) if path.exists() else []
    problems = [
        f"{ALLOW_FILE}: entry {number} needs path, rule and a reason, may have name, and nothing else"
        for number, entry in enumerate(entries, start=1)
        if not {"path", "rule", "reason"} <= set(entry) <= ALLOW_KEYS or len(entry["reason"].split()) < 3
    ]
    if problems:
        return [], problems
    return [Allowed(entry["path"], entry["rule"], entry.get("name")) for entry in entries], []


def read_baseline(root: Path) -> dict[str, int]:
    path = root / BASELINE_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def key(finding: Finding) -> str:
    return f"{finding.path} {finding.rule} {finding.name}"


def scan(root: Path) -> list[Finding]:
    """Check every Python file of the tree."""
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return [
        finding
        for path in paths
        for finding in findings(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    ]


def measure(found: list[Finding]) -> dict[str, int]:
    """Add up what the ratchet compares: the largest size for rules of size, the number of findings for others."""
    weights: dict[str, int] = defaultdict(int)
    for finding in found:
        if finding.rule in SIZE_RULES:
            weights[key(finding)] = max(weights[key(finding)], finding.size)
        else:
            weights[key(finding)] += 1
    return dict(weights)


def check(root: Path, *, shrink: bool) -> list[str]:
    """Return every problem of the tree, as lines for a person."""
    allowed, problems = read_allowed(root)
    everything = scan(root)
    problems += [
        f"{ALLOW_FILE}: the entry for {entry.path} [{entry.rule}] {entry.name or ''} matches nothing: remove it"
        for entry in allowed
        if not any(entry.covers(finding) for finding in everything)
    ]
    found = [finding for finding in everything if not any(entry.covers(finding) for entry in allowed)]
    now, baseline = measure(found), read_baseline(root)
    problems += [str(finding) for finding in found if now[key(finding)] > baseline.get(key(finding), 0)]
    shrunk = {name: min(size, now[name]) for name, size in baseline.items() if name in now}
    if shrink:
        (root / BASELINE_FILE).write_text(json.dumps(shrunk, indent=2, sort_keys=True) + "\n")
    elif shrunk != baseline:
        problems.append(
            f"{BASELINE_FILE}: some of it is mended: lower the ratchet with `python tools/tidy.py --shrink`"
        )
    return problems


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Check sizes, names, units and refused constructs.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to check")
    parser.add_argument("--shrink", action="store_true", help="lower the ratchet to what is left")
    options = parser.parse_args(arguments)
    problems = check(options.root, shrink=options.shrink)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
