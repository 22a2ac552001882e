"""A worker's steps use the core of a sleeping neighbour, and leave it when the neighbour wakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process may use one core only")


@pytest.fixture(scope="module")
def seen() -> dict[str, object]:
    command = [sys.executable, "-m", "tests.unit.compute.native_guests"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_guest_computes_on_the_neighbours_core_at_idle_priority(seen: dict[str, object]) -> None:
    """Linux runs SCHED_IDLE threads on a core only while it is idle, so the owner never waits for a guest."""
    assert seen["guest_on"] == [seen["theirs"]]
    assert seen["main_on"] == [seen["ours"]]
    assert seen["guest_is_idle_class"]
    assert isinstance(seen["quiet_ns"], int)
    assert seen["quiet_ns"] > 0


def test_a_preempted_guest_with_unfinished_work_is_recalled(seen: dict[str, object]) -> None:
    """Otherwise the step would wait until the neighbour sleeps again."""
    assert isinstance(seen["recalls"], int)
    assert seen["recalls"] > 0


def test_no_bit_depends_on_a_guest(seen: dict[str, object]) -> None:
    assert seen["same"]


def test_a_guest_takes_no_cpu_time_between_steps(seen: dict[str, object]) -> None:
    assert seen["idle_ns"] == 0
