"""Hosts on a real Ray cluster of five nodes on this machine, which lose a node while requests run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.clusters.test_ray_server import newest_pid
from tests.serving import NO_TLS, RunningServer, serving

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]
ENVIRONMENT = Path.home() / ".cache" / "baton" / "clients" / "ray-2.60"
PACKAGE = "ray==2.60.0"
ROOT = Path(__file__).resolve().parents[2]
BODY = {"prompt": "hello again " * 4, "max_tokens": 6000, "ignore_eos": True, "temperature": 0, "n": 4}
CONFIG = """
[launcher]
use = "ray"
address = "{address}"
[[launcher.groups]]
prefill = 1
arguments = ["--kv-blocks=4096"]
[[launcher.groups]]
decode = 1
hosts = 2
arguments = ["--kv-blocks=4096"]
"""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a running cluster."""

    process: subprocess.Popen[str]
    address: str
    pids: list[int]
    environment: dict[str, str]

    def kill_node_of(self, pid: int) -> None:
        """Kill the node that runs a process, with that process: with a machine, everything on it ends at once."""
        gone: list[int] = []
        while pid not in self.pids:
            gone.append(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{self.pids.index(pid)}\n")
        self.process.stdin.flush()
        for each in reversed(gone):
            with suppress(ProcessLookupError):  # its parent's death has ended it
                os.kill(each, signal.SIGKILL)
        assert self.process.stdout.readline() == "killed\n"


@pytest.fixture(scope="module")
def packages() -> Path:
    """Install Ray into an environment of its own. Return the folder of its packages."""
    program = ENVIRONMENT / "bin" / "python"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True, capture_output=True)
    if subprocess.run([str(program), "-c", "import ray"], capture_output=True, check=False).returncode:
        install = [str(program), "-m", "pip", "install", "--quiet", PACKAGE]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot install {PACKAGE}: {done.stderr.strip()[-200:]}")
    (folder,) = (ENVIRONMENT / "lib").glob("python*/site-packages")
    return folder


@pytest.fixture(scope="module")
def nodes(packages: Path) -> Iterator[Nodes]:
    """A head and four nodes of one CPU: each of the four has room for one host."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(packages)]),
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "ray_nodes.py"), "4", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        assert process.stdout is not None
        address, *pids = process.stdout.readline().split()
        yield Nodes(process, address, [int(pid) for pid in pids], environment)
    finally:
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = tmp_path_factory.mktemp("ray") / "baton.toml"
    config.write_text(CONFIG.format(address=nodes.address))
    with serving("hash", "--config", str(config), environment=nodes.environment) as running:
        yield running


def baton_ray(nodes: Nodes, *arguments: str) -> str:
    """Run `baton ray ARGUMENTS` on the cluster. Return its output."""
    command = [sys.executable, "-m", "baton.cli.main", "ray", *arguments, "--address", nodes.address]
    done = subprocess.run(command, env=os.environ | nodes.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_server_runs_in_the_cluster_until_it_is_told_to_end(nodes: Nodes, tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text(
        f'model = "hash"\n[http]\nport = 0\n[launcher]\naddress = "{nodes.address}"\n[topology]\nmixed = 1\n'
    )
    said = baton_ray(nodes, "up", "--config", str(config))
    url = next(line.split()[1] for line in said.splitlines() if line.startswith("ready: "))
    short = {**BODY, "max_tokens": 8, "n": 1}
    assert httpx.post(f"{url}/v1/completions", json=short, timeout=60, verify=NO_TLS).status_code == 200
    baton_ray(nodes, "down")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", verify=NO_TLS)


def test_no_request_is_lost_with_a_node(server: RunningServer, nodes: Nodes) -> None:
    """The hosts of the node start again where there is room, and requests go on meanwhile."""
    answers: list[dict] = []
    with server.client(timeout_s=300.0) as client:
        quiet = client.post("/v1/completions", json=BODY).raise_for_status().json()

        def ask() -> None:
            answers.append(client.post("/v1/completions", json=BODY).raise_for_status().json())

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        server.wait_until(
            lambda state: any(worker["running"] for worker in state["workers"] if worker["host"] == "decode-0"),
            reason="a request decodes there",
        )
        victim = newest_pid(server, "decode-0")
        nodes.kill_node_of(victim)
        for thread in asking:
            thread.join()
    assert len(answers) == 4
    assert max(answer["timings"]["attempts"] for answer in answers) > 1
    for answer in answers:
        assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in quiet["choices"]]
    state = server.wait_until(
        lambda _state: newest_pid(server, "decode-0") != victim, reason="its host starts elsewhere"
    )
    assert {worker["host"] for worker in state["workers"]} >= {"prefill-0", "decode-1"}
