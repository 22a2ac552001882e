"""INV-6: one seed, one sequence of bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.campaign.run import play_seed

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 17, 42)
PLAY = """
import sys
from pathlib import Path

from tests.campaign.run import play_seed

for seed in sys.argv[2:]:
    (Path(sys.argv[1]) / seed).write_bytes(play_seed(int(seed), faults=True))
"""


@cache
def first_log(seed: int) -> bytes:
    return play_seed(seed, faults=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_bytes(seed: int) -> None:
    assert len(first_log(seed)) > 1000
    assert play_seed(seed, faults=True) == first_log(seed)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_order_of_hashes_decides_nothing(hash_seed: str, tmp_path: Path) -> None:
    """Interpreters whose sets and dicts of strings have other orders write the same logs, with faults on."""
    command = [sys.executable, "-c", PLAY, str(tmp_path), *map(str, SEEDS)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed})
    for seed in SEEDS:
        assert (tmp_path / str(seed)).read_bytes() == first_log(seed), seed
