"""Two real vLLM servers (the CPU build, in an environment of its own) behind `baton serve`.

They share KV through files (`ExampleConnector`), so each can compute prompts for the other one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.command_line import baton
from tests.serving import NO_TLS, RunningServer, nothing_used, serving

pytestmark = [pytest.mark.deep, pytest.mark.timeout(3600)]
START_S = 1200.0
ANSWER_S = 900.0
"""Limit of each answer and of each pause in one. Ten requests at once take minutes on a busy machine."""
PEERS = Path.home() / ".cache" / "baton" / "peers"
WORDS = "The river ran past the old mill, and the miller counted his sacks before the rain came down again. "
PROMPTS = [f"{number}. {WORDS * repeats}Then" for number, repeats in enumerate((1, 3, 7, 8, 11, 14))]
"""About 25 to 330 tokens: vLLM's blocks have 128 on a CPU."""
APART = [f"Apart {number}. {WORDS * (1 + number % 15)}Then" for number in range(30)]
TOKENS = 24
ABORTS = 100
UNUSED_READS, READS_MAX = 5, 3000
PATIENT = f"[engines]\nsilent_s = {ANSWER_S}\n"
"""A configuration in which no server is lost for being slow: these tests are about servers that end."""
LOADED = "vllm:external_prefix_cache_hits_total"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(slots=True)
class Vllm:
    """A running `vllm serve`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self) -> None:
        deadline_s = time.perf_counter() + START_S
        while time.perf_counter() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if httpx.get(f"{self.url}/health", verify=NO_TLS).status_code == 200:
                    return
            except httpx.TransportError:
                threading.Event().wait(0.5)
        raise AssertionError(f"not ready:\n{self.log.read_text()[-3000:]}")

    def text(self, prompt: str, tokens: int = TOKENS) -> str:
        """Return the server's own greedy answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=ANSWER_S, verify=NO_TLS)
        return answer.raise_for_status().json()["choices"][0]["text"]

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=ANSWER_S, verify=NO_TLS).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def wait_unused(self) -> None:
        """Wait until no request runs or waits and no block is in use, in several reads in a row.

        One read is not enough: a busy server may begin a request after its client has left, and end it a moment later.
        """
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        found: list[list[float]] = []
        for _ in range(READS_MAX):
            found = [*found, [self.metric(name) for name in names]][-UNUSED_READS:]
            if found == [[0, 0, 0]] * UNUSED_READS:
                return
            threading.Event().wait(0.2)
        raise AssertionError(f"still in use, by {names}: {found}")

    def kill(self) -> None:
        """Kill the server and its engine process, as the system does when memory runs out."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def installed_model() -> Path:
    """Install vLLM once, and write the model as a folder that both can read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
        from peers import install, models

        patch.setattr(install, "PEERS", tuple(kind for kind in install.PEERS if kind.name == "vllm"))
        install.install(PEERS)
        return models.write_folder(PEERS / "models" / "bfloat16")


@pytest.fixture(scope="module")
def model() -> Path:
    return installed_model()


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Return the flag for a patient server."""
    file = tmp_path / "baton.toml"
    file.write_text(PATIENT)
    return f"--config={file}"


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    running = [_start(model, folder, name) for name in ("a", "b")]
    try:
        for each in running:
            each.wait_ready()
        yield running
    finally:
        for each in running:
            if each.process.poll() is None:
                each.kill()


def _start(model: Path, folder: Path, name: str) -> Vllm:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
    }
    flags = ["--port", str(port), "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    flags += ["--enable-scale-out", "--served-model-name", "m", "--kv-transfer-config", json.dumps(connector)]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PEERS / "vllm" / "bin" / "python", "-m", "vllm.entrypoints.cli.main", "serve", str(model), *flags],
            stdout=output,
            stderr=output,
            env={**os.environ, **SETTINGS},
            start_new_session=True,
        )
    return Vllm(f"http://127.0.0.1:{port}", process, log)


def text_through(server: RunningServer, prompt: str, request_id: str = "") -> str:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"x-request-id": request_id} if request_id else {}
    with server.client(timeout_s=ANSWER_S) as client:
        answer = client.post("/v1/completions", json=body, headers=headers).raise_for_status()
    return answer.json()["choices"][0]["text"]


def test_greedy_texts_are_those_of_plain_vllm(engines: list[Vllm], model: Path, config: str) -> None:
    with serving(str(model), config, *(f"--engine-url={each.url}" for each in engines)) as server:
        assert [text_through(server, prompt) for prompt in PROMPTS] == [engines[0].text(prompt) for prompt in PROMPTS]


def test_texts_of_prefill_and_decode_apart_are_those_of_plain_vllm(
    engines: list[Vllm], model: Path, config: str, tmp_path: Path
) -> None:
    """30 prompts. The decode server loads KV that it did not compute. The log repeats and explains all choices."""
    prefill, decode = engines
    loaded, log = decode.metric(LOADED), str(tmp_path / "log")
    ids = [f"apart-{number}" for number in range(len(APART))]
    with ThreadPoolExecutor(6) as threads:
        with serving(str(model), config, *pair(engines), "--log", log) as server:
            texts = list(threads.map(lambda prompt, name: text_through(server, prompt, name), APART, ids))
        expected = list(threads.map(prefill.text, APART))
    assert decode.metric(LOADED) > loaded
    assert texts == expected
    assert "the same decisions" in baton("replay", log).stdout
    assert {"vllm-0", "vllm-1"} <= set(re.findall(r"vllm-\d", baton("explain", "apart-29", "--log", log).stdout))


def test_a_hundred_aborts_strand_no_block(engines: list[Vllm], model: Path, config: str) -> None:
    """Clients leave before the first token, after it, and in mid-answer. Both servers and Baton have no block left."""
    with serving(str(model), config, *pair(engines)) as server:
        with ThreadPoolExecutor(10) as threads:
            list(threads.map(lambda number: leave(server, number, events=number % 4), range(ABORTS)))
        server.wait_until(nothing_used, reason="Baton has freed all blocks")
        assert server.metric("baton_requests_total", 'outcome="cancelled"') > ABORTS / 2
        for each in engines:
            each.wait_unused()
        assert text_through(server, APART[0]) == engines[0].text(APART[0])


def leave(server: RunningServer, number: int, events: int) -> None:
    """Send a request for a streamed answer, and close the connection after some events. 0: while it waits for one."""
    fields = {"prompt": f"Left {number}. {WORDS * 10}", "max_tokens": 500, "ignore_eos": True, "stream": True}
    body, place = json.dumps(fields).encode(), urlsplit(server.url)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json"
    with socket.create_connection((str(place.hostname), int(place.port or 0)), timeout=ANSWER_S) as connection:
        connection.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        with connection.makefile("rb") as answer:
            if not events:
                threading.Event().wait(number / 200)
            lines: list[bytes] = []
            while events:
                lines.append(answer.readline())
                assert lines[-1], f"the answer has ended: {lines}\n{server.output()}"
                events -= lines[-1].startswith(b"data: {")


def pair(engines: list[Vllm]) -> list[str]:
    """Return the flags for a prefill and a decode server."""
    roles = ("prefill", "decode")
    return [f"--engine-url={role}={each.url}" for role, each in zip(roles, engines, strict=True)]


@contextmanager
def streaming(server: RunningServer, prompts: list[str], tokens: int) -> Iterator[list[Future[str]]]:
    """Stream answers to all prompts at once. The block runs once each has three tokens; yields the whole texts."""
    started = [threading.Event() for _ in prompts]

    def stream(number: int) -> str:
        body = {"prompt": prompts[number], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        parts: list[str] = []
        with server.client(timeout_s=ANSWER_S) as client, client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line[6:])["choices"][0]["text"])
                    if len(parts) == 3:
                        started[number].set()
        return "".join(parts)

    with ThreadPoolExecutor(len(prompts)) as threads:
        texts = [threads.submit(stream, number) for number in range(len(prompts))]
        assert all(event.wait(ANSWER_S) for event in started)
        yield texts


def test_a_killed_server_loses_no_request(engines: list[Vllm], model: Path, config: str) -> None:
    """kill -9 in mid-stream: its answers continue on the other server, with the text that they would have had."""
    prompts = [f"Killed. {number} {WORDS}" for number in range(6)]
    expected = [engines[0].text(prompt, 60) for prompt in prompts]
    with (
        serving(str(model), config, *(f"--engine-url={each.url}" for each in engines)) as server,
        streaming(server, prompts, 60) as texts,
    ):
        engines[1].kill()
        assert [text.result() for text in texts] == expected
        assert server.metric("baton_failovers_total") > 0, "the killed server had no request"
