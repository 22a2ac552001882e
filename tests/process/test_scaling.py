"""Scaling of a live server: its workers end when it is idle, and the next request starts them again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
    running = most = 2
    for line in server.output().splitlines():
        running += ("is started: scaling" in line) - ("is retired: scaling" in line)
        most = max(most, running)
    assert (most, running) == (2, 0)
