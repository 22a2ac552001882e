"""Several models in one server: each answers for itself, fails by itself, and comes and goes while the others serve."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.command_line import baton
from tests.serving import POLL_S, POLLS_MAX, RunningServer, alive, children, nothing_used, serving

CONFIG = """
[kv]
blocks = 256
[survival]
restarts_max = 1
[[models]]
name = "alpha"
model = "hash:a"
prefill = 1
decode = 1
[[models]]
name = "beta"
model = "hash:b"
mixed = 1
"""
PROMPT = "the same words for both"
LONG_TOKENS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    (folder / "baton.toml").write_text(CONFIG)
    with serving("--config", str(folder / "baton.toml"), "--log", str(folder / "run.log")) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def _complete(client: httpx.Client, model: str | None, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    if model is not None:
        body["model"] = model
    return client.post("/v1/completions", json=body).raise_for_status().json()


def _text(client: httpx.Client, model: str | None) -> str:
    return _complete(client, model)["choices"][0]["text"]


def _states(client: httpx.Client) -> dict[str, str]:
    return {each["id"]: each["state"] for each in client.get("/cluster/models").raise_for_status().json()["models"]}


def _memory_files(server: RunningServer) -> int:
    """Return how many arenas and files for weights the server process holds."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    links = [str(each.readlink()) for each in folder.iterdir() if each.is_symlink()]
    return sum("memfd:baton" in link for link in links)


def _load(server: RunningServer, client: httpx.Client, name: str, model: str) -> None:
    """Load a model of one mixed worker, and wait until it is ready."""
    body = {"name": name, "model": model, "mixed": 1, "kv": {"blocks": 64}}
    assert client.post("/cluster/models", json=body).status_code == 202
    pause = threading.Event()
    for _ in range(POLLS_MAX):
        if _states(client)[name] != "loading":
            break
        pause.wait(POLL_S)
    assert _states(client)[name] == "ready", server.output()


def test_each_request_is_served_by_the_model_that_it_names(client: httpx.Client) -> None:
    alpha, beta = _text(client, "alpha"), _text(client, "beta")
    assert alpha != beta
    assert _text(client, None) == alpha, "a request that names no model goes to the first one"
    assert _complete(client, "beta")["model"] == "beta"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["alpha", "beta"]
    assert client.get("/v1/models/beta").json()["id"] == "beta"


def test_a_model_that_is_not_served_is_a_404_with_the_nearest_name(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"model": "alpa", "prompt": "x"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "did you mean 'alpha'" in response.json()["error"]["message"]


def test_routes_of_the_cluster_show_the_model_that_the_query_names(client: httpx.Client) -> None:
    roles = {
        query: [worker["role"] for worker in client.get(f"/cluster{query}").json()["workers"]]
        for query in ("", "?model=alpha", "?model=beta")
    }
    assert roles == {"": ["prefill", "decode"], "?model=alpha": ["prefill", "decode"], "?model=beta": ["mixed"]}
    assert client.get("/cluster?model=gamma").status_code == 404


def test_metrics_have_the_model_as_a_label(server: RunningServer, client: httpx.Client) -> None:
    before = server.metric("baton_requests_total", 'model="beta",outcome="finished"')
    _complete(client, "beta")
    assert server.metric("baton_requests_total", 'model="beta",outcome="finished"') == before + 1
    lines = client.get("/metrics").text.splitlines()
    edge = [line for line in lines if line.startswith("baton_resumed_streams_total{")]
    assert edge
    assert not [line for line in edge if "model=" in line], "HTTP is shared by all models"


def test_a_log_of_each_model_explains_its_requests(server: RunningServer, client: httpx.Client, folder: Path) -> None:
    body = {"model": "beta", "prompt": PROMPT, "max_tokens": 2}
    client.post("/v1/completions", json=body, headers={"x-request-id": "of-beta"}).raise_for_status()
    told = baton("explain", "of-beta", "--url", server.url, "--model", "beta")
    assert told.returncode == 0, told.stderr
    assert "mixed-0" in told.stdout
    assert baton("explain", "of-beta", "--url", server.url).returncode == 2, "alpha has no such request"
    assert sorted(path.name for path in folder.glob("*.log")) == ["run.alpha.log", "run.beta.log"]


def test_the_death_of_a_worker_does_not_touch_the_streams_of_another_model(
    server: RunningServer, client: httpx.Client
) -> None:
    body = {"model": "beta", "prompt": PROMPT, "max_tokens": LONG_TOKENS, "ignore_eos": True, "temperature": 0}
    whole = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
    victims = [worker["pid"] for worker in client.get("/cluster?model=alpha").json()["workers"]]
    pieces: list[str] = []
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line.removeprefix("data: "))
            pieces.append(last["choices"][0]["text"])
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            victims = []
    assert "".join(pieces) == whole
    assert last["timings"]["attempts"] == 1
    assert server.metric("baton_failovers_total", 'model="beta"') == 0
    _text(client, "alpha")  # its workers have restarted


def test_a_model_is_loaded_and_unloaded_while_the_others_serve(server: RunningServer, client: httpx.Client) -> None:
    before, files = _text(client, "alpha"), _memory_files(server)
    _load(server, client, "gamma", "hash:c")
    assert _memory_files(server) > files
    assert _text(client, "gamma") not in (before, _text(client, "beta"))
    (worker,) = client.get("/cluster?model=gamma").json()["workers"]
    body = {"model": "gamma", "prompt": PROMPT, "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
    with server.client() as other, other.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert client.delete("/cluster/models/gamma").status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]", "its requests ended before it did"
    assert _states(client) == {"alpha": "ready", "beta": "ready"}
    assert not alive(worker["pid"])
    assert _memory_files(server) == files
    assert len(children(server.process.pid, "baton.serve.worker")) == 3
    assert client.post("/v1/completions", json={"model": "gamma", "prompt": "x"}).status_code == 404
    assert 'model="gamma"' not in client.get("/metrics").text
    _load(server, client, "gamma", "hash:c")  # its name is free again
    client.delete("/cluster/models/gamma").raise_for_status()
    assert _text(client, "alpha") == before
    server.wait_until(nothing_used, reason="no blocks are used")


def test_a_model_whose_worker_is_given_up_fails_alone(server: RunningServer, client: httpx.Client) -> None:
    _load(server, client, "gamma", "hash:c")
    pause, killed = threading.Event(), set[int]()
    for _ in range(POLLS_MAX):
        if _states(client)["gamma"].startswith("failed"):
            break
        (worker,) = client.get("/cluster?model=gamma").json()["workers"]
        if worker["state"] == "ready" and worker["pid"] not in killed:
            killed.add(worker["pid"])
            os.kill(worker["pid"], signal.SIGKILL)
        pause.wait(POLL_S)
    assert len(killed) == 2, "it may restart once"
    assert client.post("/v1/completions", json={"model": "gamma", "prompt": "x"}).status_code == 503
    assert client.get("/health").status_code == 200
    assert _text(client, "alpha") != _text(client, "beta")
    client.delete("/cluster/models/gamma").raise_for_status()
    assert _states(client) == {"alpha": "ready", "beta": "ready"}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "hash:d", "name": "alpha"}, 400, "two models are named 'alpha'"),
        ({"model": "hash:d", "cores": 4096}, 400, "are free"),
        ({"model": "/no/such/model"}, 400, "there is no model"),
        ({"model": "hash:d", "kv": {"blocs": 1}}, 400, "unknown key kv.blocs"),
        ({"model": "hash:d", "tiers": [{"url": "file:///tmp/x"}]}, 400, "leave them out"),
        ({"name": "d"}, 400, "model"),
    ],
)
def test_a_model_that_cannot_be_loaded_changes_nothing(
    server: RunningServer, client: httpx.Client, body: dict[str, Any], status: int, words: str
) -> None:
    files = _memory_files(server)
    response = client.post("/cluster/models", json=body)
    assert (response.status_code, _memory_files(server)) == (status, files), response.text
    assert words in response.json()["error"]["message"]
    assert _states(client) == {"alpha": "ready", "beta": "ready"}


def test_an_unknown_model_cannot_be_unloaded(client: httpx.Client) -> None:
    assert client.delete("/cluster/models/delta").status_code == 404
