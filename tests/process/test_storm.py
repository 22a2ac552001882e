"""The storm: no wrong, lost or doubled token, no request fails without a stated reason, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosting import MendableCluster
from tests.machine_faults import PreloadedFaults
from tests.process.lossy_wire import ADDRESS, LossyWire, free_port
from tests.process.storm import CLIENTS, CONFIG, Faults, Load, bodies, descriptors, memory_bytes
from tests.serving import RunningServer, alive, listening

DEEP_S, FAULT_S = 600.0, 5.0
DESCRIPTORS_MORE = 24
"""Descriptors that a server may have more after a storm: connections that clients still hold."""
MEMORY_MORE_BYTES = 192 * 2**20
HOST = ("--prefill", "1", "--decode", "1", "--kv-blocks", "512")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A cluster, and the means to break it."""

    cluster: MendableCluster
    wire: LossyWire
    preloaded: PreloadedFaults


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A server with a mixed worker, and a host with a file tier that reaches the server through a lossy wire."""
    config, port, preloaded = tmp_path / "baton.toml", free_port(), PreloadedFaults(tmp_path)
    config.write_text(CONFIG.format(tier=f"file://{tmp_path / 'own'}?bytes=64e6&io=buffered", hosts_port=port))
    arguments = ("--mixed", "1", "--kv-blocks", "512", "--hosts", "1", "--config", str(config))
    arguments += ("--allowed-host", ADDRESS)
    with listening("hash", *arguments, environment=preloaded.environment) as server:
        wire = LossyWire(http_port=int(server.url.rpartition(":")[2]), hosts_port=port)
        host = {"a": (*HOST, "--tier", f"file://{tmp_path / 'a'}?bytes=64e6&io=buffered")}
        made = MendableCluster(server, host, {}, url=wire.url, environment=preloaded.environment)
        try:
            made.mend()
            yield Stage(cluster=made, wire=wire, preloaded=preloaded)
        finally:
            made.close()
            wire.close()


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


def play(stage: Stage, seed: int, count: int, pause_s: float) -> None:
    cluster, asked = stage.cluster, bodies(seed)
    server = cluster.server
    load = Load(server.url, known_texts(server, asked), asked, random.Random(f"load {seed}"))
    faults = Faults(cluster, stage.wire, stage.preloaded, random.Random(f"faults {seed}"))
    pid = server.process.pid
    before = descriptors(pid), memory_bytes(pid)
    workers = server.worker_pids()
    asyncio.run(storm(cluster, load, faults, count, pause_s))
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
