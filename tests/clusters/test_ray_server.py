"""A server whose hosts Ray starts: they are started again when they are killed, and come and go with the load.

Ray is the small package of `fake_ray`. `test_real_ray.py` plays this with Ray itself.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import baton
from tests.serving import RunningServer, alive, serving

FAKE = Path(__file__).parent / "fake_ray"
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")])}
BODY = {"prompt": "hello again " * 4, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
LONG = {**BODY, "max_tokens": 1500, "n": 4}
HOSTS = ("prefill-0", "decode-0")
"""Of both groups."""
CONFIG = """
tick_s = 0.05
[policy.scaling]
use = "forecast-scaling"
options = { idle_s = 2.0 }
[launcher]
use = "ray"
hosts_max = 4
[[launcher.groups]]
prefill = 1
arguments = ["--kv-blocks=2048"]
[[launcher.groups]]
decode = 1
arguments = ["--kv-blocks=2048"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "baton.toml").write_text(CONFIG)
    log = str(folder / "decisions.log")
    with serving("hash", "--config", str(folder / "baton.toml"), "--log", log, environment=ENVIRONMENT) as running:
        yield running


def newest_pid(server: RunningServer, host: str) -> int:
    """Return the process of a host that Ray has started last."""
    return int(re.findall(rf"{host} starts on .* \(pid (\d+)\)", server.output())[-1])


def test_a_killed_host_starts_again_and_no_request_is_lost(server: RunningServer) -> None:
    with server.client(timeout_s=120.0) as client:
        quiet = client.post("/v1/completions", json=LONG).raise_for_status().json()
        answers: list[dict] = []

        def ask() -> None:
            answers.append(client.post("/v1/completions", json=LONG).raise_for_status().json())

        asking = threading.Thread(target=ask)
        asking.start()
        state = server.wait_until(
            lambda state: any(worker["running"] and worker["role"] == "decode" for worker in state["workers"]),
            reason="the request decodes",
        )
        busy = [worker for worker in state["workers"] if worker["running"] and worker["role"] == "decode"]
        host = busy[0]["host"]
        victim = newest_pid(server, host)
        os.kill(victim, signal.SIGKILL)
        asking.join()
    assert [choice["text"] for choice in answers[0]["choices"]] == [choice["text"] for choice in quiet["choices"]]
    assert answers[0]["timings"]["attempts"] > 1
    server.wait_until(lambda _state: newest_pid(server, host) != victim, reason="the host starts again")


def test_idle_hosts_leave_the_next_request_starts_new_ones_and_the_end_of_the_server_ends_them(
    server: RunningServer, tmp_path: Path
) -> None:
    """The log of it replays. A host that is only silent on a busy machine has not left: its process runs."""
    log = tmp_path / "decisions.log"
    with server.client(timeout_s=120.0) as client:
        first = client.post("/v1/completions", json=BODY).raise_for_status().json()
        server.wait_until(
            lambda state: not state["hosts"] and not any(alive(newest_pid(server, host)) for host in HOSTS),
            reason="every host has left",
        )
        assert client.get("/ready").status_code == 200
        second = client.post("/v1/completions", json=BODY).raise_for_status().json()
        log.write_bytes(client.get("/cluster/log").raise_for_status().content)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    host = second["timings"]["decode_worker"].partition(".")[0]
    assert "-added-" in host
    pid = newest_pid(server, host)
    assert server.stop() == 0
    assert not alive(pid)
    replayed = baton("replay", str(log))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.deep
def test_without_a_ray_cluster_the_server_says_what_to_do(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text('[launcher]\nuse = "ray"\naddress = "10.0.0.1:6379"\n')
    command = [sys.executable, "-m", "baton.cli.main", "serve", "hash", "--config", str(config), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT, check=False)
    assert done.returncode == 2, done.stdout
    assert "no Ray cluster at 10.0.0.1:6379: Could not find any running Ray instance" in done.stderr
