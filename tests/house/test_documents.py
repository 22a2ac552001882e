"""Documents are checked: generated pages, links, test names, sizes, dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from baton.core.config import SandboxConfig
from baton.core.http_config import BatchesConfig
from baton.core.limits import LimitsConfig

ROOT = Path(__file__).resolve().parents[2]
GENERATORS = sorted(path.name for path in (ROOT / "tools").glob("gen_*.py"))
README_LINES_MAX = 80
MANUAL_WORDS_MAX = 20_000
NO_LIMITS = ("sandbox.processes", "batches.folder", "batches.requests_max")
"""Settings beside limits that refuse nothing."""
INVARIANTS = 9
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
TEST_NAME = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
MACHINE_PATH = re.compile(r"(?<![\w.~$}*-])/(?:home|root|Users|work|tmp/house)/\w")
REGISTRY_HOST = re.compile(r"pypi\.org|pythonhosted\.org|registry\.npmjs|download\.pytorch\.org|/simple/\b")


@pytest.mark.parametrize("generator", GENERATORS)
def test_generated_pages_are_up_to_date(root: Path, generator: str) -> None:
    """`make docs` writes them; this only compares."""
    command = [sys.executable, f"tools/{generator}", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_invariant_names_a_test_that_exists(root: Path) -> None:
    """An invariant without a test holds nothing."""
    rows = re.findall(r"^\|INV-(\d+)\|(.*)$", (root / "docs" / "invariants.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, INVARIANTS + 1))
    for number, row in rows:
        named = TEST_NAME.findall(row)
        assert named, f"INV-{number} names no test"
        for path, name in named:
            source = (root / path).read_text() if (root / path).exists() else ""
            defined = rf"^\s*(?:(?:async )?def {name}\(|class {name}\b|{name} = )"
            there = re.search(defined, source, re.MULTILINE) is not None
            assert there, f"INV-{number}: there is no {path}::{name}"


def test_the_readme_stays_short(root: Path) -> None:
    assert len((root / "README.md").read_text().splitlines()) <= README_LINES_MAX


def test_the_manuals_stay_short(root: Path) -> None:
    """Decision records are not counted: each of them fits on a page."""
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= MANUAL_WORDS_MAX


def test_every_limit_is_in_the_table_of_answers(root: Path) -> None:
    """An operator looks up there what to raise. `limits.client_...` stands for the limits of one client."""
    sections = {"limits": LimitsConfig, "sandbox": SandboxConfig, "batches": BatchesConfig}
    names = {f"{section}.{field}" for section, kind in sections.items() for field in kind.__struct_fields__}
    names = {name for name in names - {*NO_LIMITS} if not name.startswith("limits.client_")}
    page = (root / "docs" / "operations.md").read_text().split("## Restart")[0]
    assert sorted(name for name in {*names, "http.body_bytes_max", "http.choices_max"} if f"`{name}`" not in page) == []


def test_no_file_names_a_machine_or_a_package_host(text_files: dict[Path, str]) -> None:
    """Paths of one machine and hosts of package indexes are configuration, not content."""
    guilty = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in text_files.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line)
    ]
    assert guilty == []


def links(text: str) -> Iterator[str]:
    """Yield the relative link targets of a Markdown page, outside of code."""
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield unquote(target)


def anchors(text: str) -> set[str]:
    """Names that headings of a page can be linked by."""
    headings = re.findall(r"^#+ +(.*?) *#*$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_somewhere(text_files: dict[Path, str]) -> None:
    broken = []
    for page in (path for path in text_files if path.suffix == ".md"):
        for target in links(text_files[page]):
            file, _, anchor = target.partition("#")
            place = (page.parent / file).resolve() if file else page
            found = place.exists() and (not anchor or place.is_dir() or anchor in anchors(place.read_text()))
            if not found:
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_dependency_has_its_reason(root: Path) -> None:
    """docs/adr/0003-dependencies.md says of each why it is here and what it costs."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {match[0] for line in wanted if (match := re.match(r"[\w.-]+", line))}
    reasons = (root / "docs" / "adr" / "0003-dependencies.md").read_text()
    assert {name for name in names if f"| `{name}` |" not in reasons} == set()
