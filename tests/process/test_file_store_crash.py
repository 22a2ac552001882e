"""kill -9 in the middle of puts: what the next run serves is what was put, byte for byte."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core.types import BlockHash
from tests.process.endless_puts import CAPACITY_BLOCKS, PUT_BLOCKS, open_store
from tests.seeds import Seeds
from tests.stores import get

ROOT = Path(__file__).parents[2]
KILLS, KILLS_DEEP = 6, 20


def _killed(folder: Path, block_bytes: int, *, first: int, drawn: random.Random) -> list[BlockHash]:
    """Run a child, kill it somewhere in one of its first puts, and return what it said that it kept."""
    command = [sys.executable, "-m", "tests.process.endless_puts", str(folder), str(block_bytes), str(first)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = [child.stdout.readline() for _ in range(drawn.randrange(1, 30))]
    for _ in range(drawn.randrange(40_000)):
        pass  # some microseconds, so that the signal does not always meet the same instruction
    child.send_signal(signal.SIGKILL)
    rest, _ = child.communicate()
    whole = [line for line in [*said, *rest.splitlines(keepends=True)] if line.endswith("\n")]
    return [BlockHash(bytes.fromhex(word)) for line in whole for word in line.split()]


@pytest.mark.parametrize("block_bytes", [4096, 300_000])
def test_what_is_served_after_kill_9_is_byte_exact(tmp_path: Path, block_bytes: int, seeds: Seeds) -> None:
    """All that was said to be kept, and was not forgotten for room since, is there; and no other byte is ever wrong."""
    drawn = random.Random(11)
    for turn in range(KILLS_DEEP if seeds.deep else KILLS):
        said = _killed(tmp_path, block_bytes, first=turn * 10_000, drawn=drawn)
        store = open_store(tmp_path, block_bytes)
        held = store.held()
        found = get(store, held, block_bytes)  # compares every byte
        assert found.count(False) <= PUT_BLOCKS, "only the put that was under way leaves headers without blocks"
        assert len(held) <= CAPACITY_BLOCKS
        last = said[-(CAPACITY_BLOCKS - 2 * PUT_BLOCKS) :]
        assert get(store, last, block_bytes) == [True] * len(last)
        store.close()
        if turn % 3 == 0:
            (tmp_path / "index").unlink()
