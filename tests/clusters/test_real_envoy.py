"""The endpoint picker behind a real Envoy, with real Baton servers as the pool."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from baton.serve.live.live_request import UPDATE_TOKENS_MAX
from tests.clusters.cached_packages import envoy_program, grpc_folder
from tests.command_line import baton
from tests.serving import NO_TLS, RunningServer, serving

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]
CONFIG = Path(__file__).resolve().parents[2] / "examples" / "gateway" / "envoy.yaml"
SERVERS = 3
START_S = 60.0
LONG = "the quick brown fox jumps over the lazy dog and runs on. " * 8


@dataclass
class Gateway:
    """A running Envoy with a picker and its pool."""

    url: str
    servers: list[RunningServer]
    log: Path
    said: list[str]

    def post(self, prompt: str, tokens: int = 8, **headers: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=120, verify=NO_TLS)

    @contextmanager
    def streaming(self, prompt: str, tokens: int) -> Iterator[httpx.Response]:
        """Ask for a streamed answer. The block runs once it has begun; the connection closes after it."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120, verify=NO_TLS) as answer:
            assert answer.status_code == 200, answer.read()
            yield answer

    def stream(self, prompt: str, tokens: int) -> list[str]:
        """Return the events of a streamed answer."""
        with self.streaming(prompt, tokens) as answer:
            return [line for line in answer.iter_lines() if line]

    def served(self) -> list[int]:
        """Return the requests that each server has finished."""
        return [int(server.metric("baton_requests_total", 'outcome="finished"')) for server in self.servers]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def address(server: RunningServer) -> str:
    return f"127.0.0.1:{urlsplit(server.url).port}"


def endpoints(addresses: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for each in addresses:
        host, _, port = each.rpartition(":")
        place = {"socket_address": {"address": host, "port_value": int(port)}}
        rows.append({"endpoint": {"address": place}})
    return [{"lb_endpoints": rows}]


def envoy_config(pool: list[str], picker: int, clients: int) -> str:
    """Return the example's configuration with other ports and servers."""
    config = yaml.safe_load(CONFIG.read_text())
    resources = config["static_resources"]
    resources["listeners"][0]["address"]["socket_address"]["port_value"] = clients
    of_name = {cluster["name"]: cluster["load_assignment"] for cluster in resources["clusters"]}
    of_name["pool"]["endpoints"] = endpoints(pool)
    of_name["picker"]["endpoints"] = endpoints([f"127.0.0.1:{picker}"])
    return yaml.safe_dump(config)


def follow(process: subprocess.Popen[str], said: list[str], mark: str, count: int) -> threading.Event:
    """Collect the lines of a process. The event is set once `count` of them have the mark, or the process ends."""
    seen = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                said.append(line)
                if sum(mark in each for each in said) >= count:
                    seen.set()
        seen.set()

    threading.Thread(target=read, daemon=True).start()
    return seen


@contextmanager
def process(command: list[str], mark: str, count: int, **environment: str) -> Iterator[list[str]]:
    """Run a program that has said `mark` `count` times."""
    said: list[str] = []
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )
    try:
        assert follow(running, said, mark, count).wait(START_S), "".join(said)
        assert running.poll() is None, "".join(said)
        yield said
    finally:
        running.terminate()
        running.wait(30)


@contextmanager
def gateway(folder: Path) -> Iterator[Gateway]:
    """Run servers, a picker for them and Envoy."""
    clients, picking, log = free_port(), free_port(), folder / "picks.log"
    with ExitStack() as stack:
        servers = [stack.enter_context(serving("hash", "--mixed", "1")) for _ in range(SERVERS)]
        pool = [address(server) for server in servers]
        command = [sys.executable, "-u", "-m", "baton.cli.main", "picker", "--port", str(picking), "--log", str(log)]
        command += [f"--engine-url=http://{each}" for each in pool]
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(grpc_folder())])
        said = stack.enter_context(process(command, "takes requests as", SERVERS, PYTHONPATH=path))
        config = folder / "envoy.yaml"
        config.write_text(envoy_config(pool, picking, clients))
        envoy = [str(envoy_program()), "--config-path", str(config), "--use-dynamic-base-id", "--concurrency", "1"]
        stack.enter_context(process(envoy, "starting main dispatch loop", 1))
        yield Gateway(f"http://127.0.0.1:{clients}", servers, log, said)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway")) as made:
        yield made


def test_answers_are_those_of_the_servers(running: Gateway) -> None:
    """Texts, streams, large bodies and requests without a body pass through."""
    body = {"prompt": LONG, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    direct = httpx.post(f"{running.servers[0].url}/v1/completions", json=body, timeout=60, verify=NO_TLS).json()
    answer = running.post(LONG)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == direct["choices"][0]["text"]
    tokens = 3 * UPDATE_TOKENS_MAX
    events = running.stream(LONG, tokens)
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1]]
    assert len([text for text in texts if text]) > 1, "the text comes in parts"
    assert "".join(texts) == running.post(LONG, tokens).json()["choices"][0]["text"]
    models = httpx.get(f"{running.url}/v1/models", timeout=60, verify=NO_TLS)
    assert (models.status_code, models.json()["object"]) == (200, "list")
    large = httpx.post(
        f"{running.url}/tokenize", json={"prompt": "word " * 60_000, "add_special_tokens": False},
        timeout=60, verify=NO_TLS,
    )  # fmt: skip
    assert large.status_code in (200, 400), "a body of 300 KB reaches a server, whatever it says"


def test_turns_of_a_conversation_stay_on_one_server(running: Gateway) -> None:
    for number in range(6):
        prompt, before = f"{number} {LONG}", running.served()
        for turn in range(3):
            prompt += f" turn {turn} " + LONG
            answer = running.post(prompt)
            assert answer.status_code == 200, answer.text
        rows = [after - earlier for after, earlier in zip(running.served(), before, strict=True)]
        assert sorted(rows) == [0] * (SERVERS - 1) + [3], rows


def test_requests_at_once_are_spread(running: Gateway) -> None:
    before = running.served()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: running.post(f"{number} apart {LONG}", 64), range(24)))
    assert {answer.status_code for answer in answers} == {200}
    assert min(after - earlier for after, earlier in zip(running.served(), before, strict=True)) > 0


def test_a_request_that_cannot_meet_its_slo_is_answered_by_the_picker(running: Gateway) -> None:
    """Streams that their clients do not read keep all servers busy."""
    with ExitStack() as stack:
        unread: list[Iterator[str]] = []
        for number in range(6):
            answer = stack.enter_context(running.streaming(f"{number} {LONG}", 4000))
            unread.append(answer.iter_lines())  # kept: httpx closes the connection with the iterator
            next(unread[-1])
        refused = running.post("late " + LONG * 5, **{"x-llm-d-slo-ttft-ms": "0.01"})
    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "slo"


def test_a_killed_server_costs_no_new_request(running: Gateway, tmp_path: Path) -> None:
    """Requests that are on their way to it go to the next picked server. The log repeats all of it."""
    victim = running.servers[-1]
    victim.process.kill()
    victim.process.wait()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: running.post(f"{number} after {LONG}", 4), range(32)))
    assert {answer.status_code for answer in answers} == {200}, [each.text for each in answers if each.is_error]
    lost = re.compile(rf"{re.escape(address(victim))} takes no requests: no process listens there")
    assert any(lost.search(line) for line in running.said), running.said
    copied = tmp_path / "copy"
    copied.write_bytes(running.log.read_bytes())
    done = baton("replay", str(copied))
    assert "the same decisions" in done.stdout, (done.stdout, done.stderr)


def test_without_servers_clients_get_a_503(tmp_path: Path) -> None:
    config, clients, picking = tmp_path / "envoy.yaml", free_port(), free_port()
    gone = f"127.0.0.1:{free_port()}"
    config.write_text(envoy_config([gone], picking, clients))
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(grpc_folder())])
    picker = [
        sys.executable,
        "-u",
        "-m",
        "baton.cli.main",
        "picker",
        "--port",
        str(picking),
        f"--engine-url=http://{gone}",
    ]
    envoy = [str(envoy_program()), "--config-path", str(config), "--use-dynamic-base-id"]
    with process(picker, "takes no requests", 1, PYTHONPATH=path), process(envoy, "starting main dispatch loop", 1):
        answer = httpx.post(f"http://127.0.0.1:{clients}/v1/completions", json={"prompt": "a"}, verify=NO_TLS)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert json.loads(answer.text)["error"]["code"] == "no_worker"
