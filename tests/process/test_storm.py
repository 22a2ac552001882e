"""The storm: no wrong, lost or doubled token, no request fails without a stated reason, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.storm import Faults, Load, Stage, bodies, descriptors, known_texts, memory_bytes, staged, storm
from tests.serving import alive

DEEP_S, FAULT_S = 600.0, 5.0
DESCRIPTORS_MORE = 24
"""Descriptors that a server may have more after a storm: connections that clients still hold."""
MEMORY_MORE_BYTES = 192 * 2**20


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged("hash", tmp_path) as made:
        yield made


def play(stage: Stage, seed: int, count: int, pause_s: float) -> None:
    cluster, asked = stage.cluster, bodies(seed)
    server = cluster.server
    load = Load(server.url, known_texts(server, asked), asked, random.Random(f"load {seed}"))
    faults = Faults(cluster, stage.wire, stage.preloaded, random.Random(f"faults {seed}"))
    pid = server.process.pid
    before = descriptors(pid), memory_bytes(pid)
    workers = server.worker_pids()
    asyncio.run(storm(load, faults, count, pause_s))
    assert not load.wrong, f"seed {seed}, {faults.seen}: {load.wrong[:3]}\n{server.output()[-4000:]}"
    assert load.answered["right"] > count, load.answered
    assert all(stage.wire.kinds.values()), stage.wire.kinds
    stage.preloaded.delay_disk(0.0)
    cluster.mend()
    assert len(server.cluster()["workers"]) == len(workers)
    assert not any(alive(pid) for pid in set(workers) - set(server.worker_pids())), "an old worker is left"
    assert descriptors(pid) <= before[0] + DESCRIPTORS_MORE
    assert memory_bytes(pid) <= before[1] + MEMORY_MORE_BYTES
    assert server.metric("baton_kv_blocks", 'state="used"') == 0


def test_no_token_is_wrong_or_lost_in_a_storm_of_faults(stage: Stage) -> None:
    play(stage, seed=1, count=15, pause_s=0.0)


@pytest.mark.deep
@pytest.mark.timeout(3 * DEEP_S)
def test_no_token_is_wrong_or_lost_in_ten_minutes_of_faults(stage: Stage) -> None:
    """Of every kind of control message, one is repeated or lost."""
    stage.wire.repeats_each_kind = True
    play(stage, seed=2, count=round(DEEP_S / FAULT_S), pause_s=FAULT_S)
    assert stage.wire.seen == stage.wire.kinds["repeated"] | stage.wire.kinds["lost"]
