"""INV-6: one seed, one sequence of bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign.run import play_seed

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 17, 42)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_bytes(seed: int) -> None:
    log = play_seed(seed, faults=True)
    assert len(log) > 1000
    assert play_seed(seed, faults=True) == log


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_hashes_decides_nothing(seed: int, tmp_path: Path) -> None:
    """Two interpreters whose sets and dicts of strings have other orders write the same log, with faults on."""
    logs: list[bytes] = []
    for hash_seed in ("1", "2"):
        path = tmp_path / hash_seed
        command = [sys.executable, "-m", "tests.campaign.run", "--seed", str(seed), "--faults", "--log", str(path)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed})
        logs.append(path.read_bytes())
    assert logs[0] == logs[1]
    assert logs[0] == play_seed(seed, faults=True)
