"""The storm: no wrong, lost or doubled token, no request fails without a stated reason, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosting import MendableCluster
from tests.process.storm import CLIENTS, CONFIG, Faults, Load, bodies, descriptors, memory_bytes
from tests.serving import RunningServer, alive, listening

DEEP_S, FAULT_S = 600.0, 5.0
DESCRIPTORS_MORE = 24
"""Descriptors that a server may have more after a storm: connections that clients still hold."""
MEMORY_MORE_BYTES = 192 * 2**20
HOST = ("--prefill", "1", "--decode", "1", "--kv-blocks", "512")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MendableCluster]:
    """A server with a mixed worker and a host with a file tier."""
    config = tmp_path / "baton.toml"
    config.write_text(CONFIG.format(tier=f"file://{tmp_path / 'own'}?bytes=64e6&io=buffered"))
    arguments = ("--mixed", "1", "--kv-blocks", "512", "--hosts", "1", "--config", str(config))
    with listening("hash", *arguments) as server:
        made = MendableCluster(server, {"a": (*HOST, "--tier", f"file://{tmp_path / 'a'}?bytes=64e6&io=buffered")}, {})
        try:
            made.mend()
            yield made
        finally:
            made.close()


def known_texts(server: RunningServer, asked: list[dict]) -> dict[int, str]:
    """Return the text of every request, as the calm server gives it."""
    with server.client() as client:
        answers = [client.post("/v1/completions", json=body).raise_for_status().json() for body in asked]
    return {number: answer["choices"][0]["text"] for number, answer in enumerate(answers)}


async def storm(cluster: MendableCluster, load: Load, faults: Faults, count: int, pause_s: float) -> None:
    """Play faults under load, each after every client could get an answer since the last one."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        for _ in range(count):
            await load.wait_for(CLIENTS)
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(faults.strike)
        await load.wait_for(CLIENTS)
        load.is_over = True


def play(cluster: MendableCluster, seed: int, count: int, pause_s: float) -> None:
    server, asked = cluster.server, bodies(seed)
    load = Load(server.url, known_texts(server, asked), asked, random.Random(f"load {seed}"))
    faults, pid = Faults(cluster, random.Random(f"faults {seed}")), server.process.pid
    before = descriptors(pid), memory_bytes(pid)
    workers = server.worker_pids()
    asyncio.run(storm(cluster, load, faults, count, pause_s))
    assert not load.wrong, f"seed {seed}, {faults.seen}: {load.wrong[:3]}\n{server.output()[-4000:]}"
    assert load.answered["right"] > count, load.answered
    cluster.mend()
    assert len(server.cluster()["workers"]) == len(workers)
    assert not any(alive(pid) for pid in set(workers) - set(server.worker_pids())), "an old worker is left"
    assert descriptors(pid) <= before[0] + DESCRIPTORS_MORE
    assert memory_bytes(pid) <= before[1] + MEMORY_MORE_BYTES
    assert server.metric("baton_kv_blocks", 'state="used"') == 0


def test_no_token_is_wrong_or_lost_in_a_storm_of_faults(cluster: MendableCluster) -> None:
    play(cluster, seed=1, count=9, pause_s=0.0)


@pytest.mark.deep
@pytest.mark.timeout(3 * DEEP_S)
def test_no_token_is_wrong_or_lost_in_ten_minutes_of_faults(cluster: MendableCluster) -> None:
    play(cluster, seed=2, count=round(DEEP_S / FAULT_S), pause_s=FAULT_S)
