"""`baton restart` under load: every worker is another process, and every request has its text."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from baton.cli.main import main
from tests.serving import RunningServer, all_workers_ready, nothing_used, serving

CLIENTS, PROMPTS = 6, 4
TOPOLOGIES = {"apart": ("--prefill", "1", "--decode", "1", "--mixed", "1"), "alone": ("--mixed", "1")}


def body(number: int) -> dict:
    return {
        "prompt": f"request {number} " * 20,
        "max_tokens": 300,
        "ignore_eos": True,
        "temperature": 1,
        "seed": number,
    }


@pytest.fixture(params=TOPOLOGIES, scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = tmp_path_factory.mktemp("restart") / "baton.toml"
    config.write_text("tick_s = 0.05\n[survival]\nattempts_max = 1\n")
    with serving("hash", "--config", str(config), *TOPOLOGIES[request.param]) as running:
        yield running


def test_every_worker_restarts_and_no_request_fails(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    with server.client() as client:
        texts = [client.post("/v1/completions", json=body(n)).json()["choices"][0]["text"] for n in range(PROMPTS)]
    before, is_over, answers = server.worker_pids(), threading.Event(), list[tuple[int, str, str]]()

    def ask(number: int) -> None:
        with server.client() as client:
            while not is_over.is_set():
                answer = client.post("/v1/completions", json=body(number % PROMPTS))
                text = answer.json().get("choices", [{"text": answer.text}])[0]["text"]
                answers.append((answer.status_code, text, texts[number % PROMPTS]))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    try:
        server.wait_until(lambda state: any(worker["running"] for worker in state["workers"]), reason="requests run")
        assert main(["restart", "--url", server.url]) == 0
    finally:
        is_over.set()
        for thread in clients:
            thread.join()
    assert capsys.readouterr().out.splitlines()[-1] == "every worker is back"
    state = server.wait_until(all_workers_ready, reason="the workers are back")
    assert not set(before) & {worker["pid"] for worker in state["workers"]}
    assert answers
    assert [answer for answer in answers if answer[0] != 200 or answer[1] != answer[2]] == []
    assert "is lost" not in server.output()
    server.wait_until(nothing_used, reason="no block is used")


def test_an_unknown_worker_is_named(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restart", "--worker", "nobody", "--url", server.url]) == 1
    assert "there is no worker 'nobody'; known: " in capsys.readouterr().err
