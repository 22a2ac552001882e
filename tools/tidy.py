"""Check what a program can check of the style: sizes, names, units, refused constructs, plain words, commit subjects.

    tidy.py             check; print `file:line: [rule] problem: remedy`
    tidy.py --all PATH  print every finding below PATH, those in the baseline included
    tidy.py --shrink    check, and lower the baseline to the findings that are left
    tidy.py --strict    also fail where the baseline or the allow-list has entries that nothing needs

tools/tidy_baseline.json lists the findings that were there before their rule; it may only shrink. tools/tidy_allow.toml
lists the findings that are right in spite of a rule, each with its reason. `--root FOLDER` checks another tree.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tidy_commits import commit_findings, commit_subjects
from tidy_prose import PROSE_FOLDERS, PROSE_RULES, PROSE_SUFFIXES, prose_findings
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


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check, as lines for a person."""

    problems: list[str]
    notes: list[str]
    """Do not fail the check, except with --strict."""


def read_allowed(root: Path) -> tuple[list[Allowed], list[str]]:
    """Read the allow-list; return its entries and the problems in them."""
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
    """Return the baseline's key: prose is counted per top folder, so that a moved file brings no new finding."""
    if finding.rule in PROSE_RULES:
        return f"{Path(finding.path).parts[0]} {finding.rule}"
    return f"{finding.path} {finding.rule} {finding.name}"


def scan(root: Path) -> list[Finding]:
    """Check every Python file of the tree, and the prose of the product and its documents."""
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    found = [
        finding
        for path in paths
        for finding in findings(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    ]
    for name in PROSE_FOLDERS:
        place = root / name
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix in PROSE_SUFFIXES and path.is_file():
                found += prose_findings(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    return found


def measure(found: list[Finding]) -> dict[str, int]:
    """Return what the baseline compares: the largest size for rules of size, the number of findings for others."""
    weights: dict[str, int] = defaultdict(int)
    for finding in found:
        if finding.rule in SIZE_RULES:
            weights[key(finding)] = max(weights[key(finding)], finding.size)
        else:
            weights[key(finding)] += 1
    return dict(weights)


def over_baseline(found: list[Finding], now: dict[str, int], baseline: dict[str, int]) -> list[str]:
    """Return one line per new finding; for prose above its count, one line per folder if most of it is old."""
    lines = []
    for name, size in now.items():
        old = baseline.get(name, 0)
        if size <= old:
            continue
        mine = [str(finding) for finding in found if key(finding) == name]
        if old and mine[0].split("[", 1)[1].split("]")[0] in PROSE_RULES:
            folder, rule = name.split()
            listing = f"list them with `tools/tidy.py --all {folder}`"
            mine = [f"{folder}: {size} findings of [{rule}], the baseline has {old}: {listing}"]
        lines += mine
    return lines


def check(root: Path, *, shrink: bool = False) -> Report:
    """Check the tree and its commits."""
    allowed, problems = read_allowed(root)
    everything = scan(root)
    subjects, note = commit_subjects(root)
    everything += commit_findings(subjects)
    notes = [note] if note else []
    notes += [
        f"{ALLOW_FILE}: the entry for {entry.path} [{entry.rule}] {entry.name or ''} matches nothing: remove it"
        for entry in allowed
        if not any(entry.covers(finding) for finding in everything)
    ]
    found = [finding for finding in everything if not any(entry.covers(finding) for entry in allowed)]
    now, baseline = measure(found), read_baseline(root)
    problems += over_baseline(found, now, baseline)
    shrunk = {name: min(size, now[name]) for name, size in baseline.items() if name in now}
    if shrink:
        (root / BASELINE_FILE).write_text(json.dumps(shrunk, indent=2, sort_keys=True) + "\n")
    elif shrunk != baseline:
        notes.append(f"{BASELINE_FILE}: some findings are gone: lower it with `python tools/tidy.py --shrink`")
    return Report(problems, notes)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Check sizes, names, units, refused constructs and plain words.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to check")
    parser.add_argument("--shrink", action="store_true", help="lower the baseline to the findings that are left")
    parser.add_argument("--strict", action="store_true", help="fail on entries that nothing needs")
    parser.add_argument("--all", metavar="PATH", help="print every finding below PATH and end")
    options = parser.parse_args(arguments)
    if options.all is not None:
        for finding in scan(options.root):
            if finding.path.startswith(options.all.rstrip("/")):
                print(finding)
        return 0
    report = check(options.root, shrink=options.shrink)
    for note in report.notes:
        print(note if options.strict else f"note: {note}")
    for problem in report.problems:
        print(problem)
    return 1 if report.problems or (options.strict and report.notes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
