"""The rule of tidy for commit subjects: `area: imperative summary`, at most 72 characters."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tidy_rules import Finding

SUBJECT_CHARACTERS_MAX = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_./, -]*: \S")
RULE = "commit-subject"
SINCE = "tools/tidy_commits.py"
"""The commit that added this file is the first one that the rule holds for."""


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def commit_subjects(root: Path) -> tuple[list[tuple[str, str]], str]:
    """Return (hash, subject) of the commits that the rule holds for, and a note where they cannot be read."""
    if not (root / ".git").exists() or _git(root, "rev-parse", "--git-dir") is None:
        return [], "commit subjects were not checked: this is no git checkout"
    if (_git(root, "rev-parse", "--is-shallow-repository") or "").strip() == "true":
        return [], "commit subjects were not checked: the checkout is shallow"
    added = (_git(root, "log", "--diff-filter=A", "--format=%H", "--", SINCE) or "").split()
    if not added:
        return [], ""
    first = added[-1]
    log = _git(root, "log", "--no-merges", "--format=%H%x09%s", f"{first}..HEAD") or ""
    return [(commit, subject) for commit, _, subject in (line.partition("\t") for line in log.splitlines())], ""


def commit_findings(subjects: list[tuple[str, str]]) -> Iterator[Finding]:
    """Yield subjects that are too long, or that do not begin with the area that the commit changes."""
    for commit, subject in subjects:
        problems = []
        if len(subject) > SUBJECT_CHARACTERS_MAX:
            problems.append(f"has {len(subject)} characters, at most {SUBJECT_CHARACTERS_MAX}")
        if not SUBJECT.match(subject):
            problems.append("does not begin with `area: `")
        if problems:
            text = f"{subject[:100]!r} {' and '.join(problems)}: reword it with `git commit --amend` or `git rebase -i`"
            yield Finding(path="commit", line=0, rule=RULE, name=commit[:12], text=f"{commit[:12]} {text}")
