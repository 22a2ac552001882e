"""`baton serve --engine vllm`: Baton starts real vLLM servers, which hand KV off through a pool of Baton."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.move.store.node import StoreNode
from tests.engines.test_real_vllm import (
    ANSWER_S,
    PATIENT,
    PEERS,
    PROMPTS,
    SETTINGS,
    START_S,
    WORDS,
    installed_model,
    streaming,
    text_through,
)
from tests.serving import NO_TLS, POLL_S_MAX, RunningServer, listening

pytestmark = [pytest.mark.deep, pytest.mark.timeout(3600)]
KEY = "k" * 40
START_POLLS = int(START_S / POLL_S_MAX)
"""Polls for a server that starts: it may take minutes longer than those that make Baton ready."""
COMMAND = f"{PEERS}/vllm/bin/python -m vllm.entrypoints.cli.main"
FLAGS = "--max-model-len 2048 --enforce-eager --served-model-name m"
SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="module")
def pool() -> Iterator[StoreNode]:
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=1 << 29)
    yield node
    node.close()


@pytest.fixture(scope="module")
def server(pool: StoreNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One prefill and two decode servers, as one command starts them."""
    folder = tmp_path_factory.mktemp("vllm")
    log, config = folder / "log", folder / "baton.toml"
    config.write_text(f"{PATIENT}\n[survival]\nstart_s = {START_S}\n")  # three servers start at once, on two cores
    given = {"engine": "vllm", "engine-command": COMMAND, "engine-flags": FLAGS, "dtype": "float32", "log": str(log)}
    given["config"] = str(config)
    given |= {"engine-store": f"pool://{pool.address}", "prefill": "1", "decode": "2"}
    flags = [f"--{name}={value}" for name, value in given.items()]
    environment = {**SETTINGS, "BATON_ENGINE_KEY": KEY, "PYTHONPATH": f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}"}
    with listening(str(installed_model()), *flags, environment=environment) as running:
        running.wait_ready(START_S)
        running.wait_until(all_are_ready, reason="all servers have joined", polls_max=START_POLLS)
        yield running


def host(state: dict, worker: int) -> dict:
    """Return the host of a worker. The prefill server is worker 0; hosts are listed in the order of joining."""
    return next(each for each in state["hosts"] if each["id"] == f"engine-{worker}")


def direct(server: RunningServer, worker: int, prompt: str, tokens: int = 24) -> str:
    """Return the greedy text of one vLLM server, asked as by another client."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    url, key = host(server.cluster(), worker)["address"], {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=ANSWER_S, verify=NO_TLS)
    return answer.raise_for_status().json()["choices"][0]["text"]


def external_hits(server: RunningServer, worker: int) -> float:
    url = host(server.cluster(), worker)["address"]
    lines = httpx.get(f"{url}/metrics", timeout=ANSWER_S, verify=NO_TLS).text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total{")
    )


def test_texts_are_those_of_plain_vllm_and_the_kv_comes_from_the_pool(server: RunningServer) -> None:
    before = external_hits(server, 1) + external_hits(server, 2)
    texts = [text_through(server, prompt) for prompt in PROMPTS]
    assert external_hits(server, 1) + external_hits(server, 2) > before
    assert texts == [direct(server, 0, prompt) for prompt in PROMPTS]


def test_blocks_that_another_client_has_cached_are_known(server: RunningServer) -> None:
    prompt = f"Followed. {WORDS * 14}"

    def cached(state: dict) -> int:
        return host(state, 1)["kv_blocks_cached"]

    before = cached(server.cluster())
    direct(server, 1, prompt, tokens=1)
    server.wait_until(lambda state: cached(state) > before, reason="KV events of vLLM have arrived")


def test_a_killed_server_loses_no_request_and_is_started_again(server: RunningServer) -> None:
    prompts = [f"Killed. {number} {WORDS}" for number in range(4)]
    expected = [direct(server, 0, prompt, 60) for prompt in prompts]
    with streaming(server, prompts, 60) as texts:
        kill_server(server, 1)
        assert [text.result() for text in texts] == expected
    assert server.metric("baton_failovers_total") > 0, "the killed server had no request"
    server.wait_until(all_are_ready, reason="it is back", polls_max=START_POLLS)


def all_are_ready(state: dict) -> bool:
    return [worker["state"] for worker in state["workers"]] == ["ready"] * 3


def kill_server(server: RunningServer, worker: int) -> None:
    """Kill the process that listens at a worker's address."""
    port = host(server.cluster(), worker)["address"].rpartition(":")[2].encode()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        words = file.read_bytes().split(b"\0") if file.exists() else []
        is_server = b"serve" in words and b"baton.integrations.engines.keeper" not in words
        if is_server and b"--port" in words and words[words.index(b"--port") + 1] == port:
            os.kill(int(file.parent.name), signal.SIGKILL)
            return
    raise AssertionError(f"no vLLM server has the port {port}")


def test_texts_are_the_same_without_the_pool(server: RunningServer, pool: StoreNode) -> None:
    """KV that cannot be read is computed. This test is the last one of the file, because it ends the pool."""
    prompts = [f"Without. {prompt}" for prompt in PROMPTS[3:]]
    pool.close()
    assert [text_through(server, prompt) for prompt in prompts] == [direct(server, 0, prompt) for prompt in prompts]
