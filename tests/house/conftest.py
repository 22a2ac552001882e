"""What the house tests share: where the repository is, and its developer tools as modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))

NOT_OURS = {".git", "__pycache__", "build", "dist", "node_modules"}


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


def ours(folder: Path) -> Iterator[Path]:
    """Yield the files under a folder, without caches, build products and hidden folders (but .ci)."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name in NOT_OURS or path.name.endswith((".egg-info", ".log")):
            continue
        if path.is_dir() and (not path.name.startswith(".") or path.name == ".ci"):
            yield from ours(path)
        elif path.is_file():
            yield path


@pytest.fixture(scope="session")
def text_files(root: Path) -> dict[Path, str]:
    """Every text file of the repository, by its path."""
    found: dict[Path, str] = {}
    for path in ours(root):
        try:
            found[path] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found
