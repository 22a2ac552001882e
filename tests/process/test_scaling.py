"""Scaling of a live server: its workers end when it is idle, and the next request starts them again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.move.cores import usable_cores
from tests.command_line import baton
from tests.serving import RunningServer, alive, nothing_used, serving

BODY = {"prompt": "hello again " * 4, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
CONFIG = """
tick_s = 0.05
[policy.scaling]
use = "forecast-scaling"
options = { idle_s = 0.2, calm_s = 0.0, busy_ratio = 1e-6 }
"""
"""So little use of a worker is enough that every load asks for 64 workers of each role."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two workers of 64 threads: as many as the cores can run."""
    config = tmp_path_factory.mktemp("scaling") / "baton.toml"
    config.write_text(CONFIG)
    with serving("hash", "--prefill", "1", "--decode", "1", "--threads", "64", "--config", str(config)) as running:
        yield running


def wait_for_sleep(server: RunningServer) -> None:
    server.wait_until(lambda state: not state["workers"] and nothing_used(state), reason="every worker is retired")


def test_an_idle_server_ends_its_workers_and_the_next_request_starts_them(server: RunningServer) -> None:
    """The arena keeps its prefixes meanwhile."""
    with server.client() as client:
        first = client.post("/v1/completions", json=BODY).raise_for_status().json()
        pids = server.worker_pids()
        wait_for_sleep(server)
        assert not any(map(alive, pids))
        assert client.get("/ready").status_code == 200
        second = client.post("/v1/completions", json=BODY).raise_for_status().json()
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert second["timings"]["cached_tokens"] > 0


def test_no_load_starts_more_workers_than_the_host_can_run(server: RunningServer) -> None:
    wait_for_sleep(server)
    with server.client() as client:
        for _ in range(2):
            client.post("/v1/completions", json={**BODY, "max_tokens": 400, "n": 8}).raise_for_status()
            wait_for_sleep(server)
    server.wait_until(lambda _: running_by_log(server)[-1] == 0, reason="the log names every retired worker")
    assert max(running_by_log(server)) == 2


def running_by_log(server: RunningServer) -> list[int]:
    """Return the number of workers at the start and after each line of output."""
    changes = [
        ("is started: scaling" in line) - ("is retired: scaling" in line) for line in server.output().splitlines()
    ]
    return [*itertools.accumulate(changes, initial=2)]


def test_an_operator_scales_a_role(tmp_path: Path) -> None:
    """Up and down, without a scaling policy, as far as the host has room; the log replays."""
    config, log = tmp_path / "baton.toml", tmp_path / "run.log"
    config.write_text("tick_s = 0.05\n")
    given = ("--mixed", "1", "--threads", "1", "--config", str(config), "--log", str(log))
    with serving("hash", *given) as server, server.client() as client:

        def scale(workers: int | None, role: str = "mixed") -> httpx.Response:
            return client.post("/cluster/scale", json={"role": role, "workers": workers})

        assert scale(2).raise_for_status().json() == {"wanted": {"mixed": 2}}
        room = min(2, usable_cores())
        server.wait_until(lambda state: ready(state) == room, reason="a worker starts")
        scale(1).raise_for_status()
        server.wait_until(lambda state: len(state["workers"]) == 1, reason="a worker is retired")
        assert client.post("/v1/completions", json=BODY).status_code == 200
        assert scale(None).raise_for_status().json() == {"wanted": {}}
        assert [scale(*wrong).status_code for wrong in ((0,), (257,), (1, "cook"))] == [400] * 3
        assert server.stop() == 0
    assert "the same decisions" in baton("replay", str(log)).stdout


def ready(state: dict[str, Any]) -> int:
    return sum(worker["state"] == "ready" for worker in state["workers"])
