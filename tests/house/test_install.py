"""The installer tells what it does, does it once, and says what to do where it cannot."""

from __future__ import annotations

import subprocess
from pathlib import Path

import install


def test_only_milestones_of_pip_are_told() -> None:
    """Large downloads and the unpacking; the other hundred lines go to the log."""
    assert install.progress("Downloading torch-2.13.0-cp311.whl (190.4 MB)") == "downloading torch (190 MB)"
    assert install.progress("Installing collected packages: a, b, c") == "unpacking 3 package(s)"
    assert install.progress("Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)") == ""
    assert install.progress("Requirement already satisfied: numpy") == ""


def test_a_python_that_is_too_old_is_refused_with_what_to_do(root: Path) -> None:
    """`false` answers as an old Python does: with a code that is not 0."""
    done = subprocess.run(["make", "setup", "PYTHON=false"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "make setup PYTHON=" in done.stderr


def test_what_was_installed_is_known_by_what_it_depends_on(tmp_path: Path) -> None:
    """A changed pyproject.toml or constraints.txt means another install; a touched file does not."""
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "tools/install.py"):
        (tmp_path / name).write_text(name)
    before = install.fingerprint(tmp_path, dev=False)
    (tmp_path / "pyproject.toml").touch()
    assert install.fingerprint(tmp_path, dev=False) == before
    assert install.fingerprint(tmp_path, dev=True) != before
    (tmp_path / "constraints.txt").write_text("torch==9")
    assert install.fingerprint(tmp_path, dev=False) != before
