"""The import contracts of pyproject.toml hold: imports go down, and the deciding half stays pure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_import_contracts_are_kept(root: Path) -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
