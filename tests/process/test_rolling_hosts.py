"""Hosts are drained and started again one after the other, under load: every request has its text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosting import MendableCluster
from tests.serving import listening

CLIENTS, PROMPTS = 4, 4
HOST = ("--mixed", "1", "--kv-blocks", "512")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MendableCluster]:
    """A server without workers and two hosts. A request whose worker is lost fails."""
    config = tmp_path / "baton.toml"
    config.write_text("tick_s = 0.05\n[survival]\nattempts_max = 1\nretries_per_minute = 0\nretry_ratio = 0\n")
    with listening("hash", "--hosts", "2", "--config", str(config)) as server:
        made = MendableCluster(server, {"a": HOST, "b": HOST}, {})
        try:
            made.mend()
            yield made
        finally:
            made.close()


def body(number: int) -> dict:
    prompt = f"request {number} " * 20
    return {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "temperature": 1, "seed": number}


def is_serving(state: dict) -> bool:
    return any(worker["running"] for worker in state["workers"])


def test_every_host_restarts_and_no_request_fails(cluster: MendableCluster) -> None:
    server, answers, is_over = cluster.server, list[tuple[int, str, str]](), threading.Event()
    with server.client() as client:
        texts = [client.post("/v1/completions", json=body(n)).json()["choices"][0]["text"] for n in range(PROMPTS)]

    def ask(number: int) -> None:
        with server.client() as client:
            while not is_over.is_set():
                answer = client.post("/v1/completions", json=body(number))
                text = answer.json().get("choices", [{"text": answer.text}])[0]["text"]
                answers.append((answer.status_code, text, texts[number]))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    try:
        for name in ("a", "b"):
            server.wait_until(is_serving, reason="requests run")
            old = cluster.hosts[name].process
            with server.client() as client:
                client.post(f"/cluster/hosts/{name}/drain", json={}).raise_for_status()
            assert old.wait(60) == 0
            cluster.mend_hosts()
            server.wait_until(
                lambda state: {host["id"] for host in state["hosts"] if host["state"] == "ready"} == {"a", "b"},
                reason="both hosts are ready",
            )
    finally:
        is_over.set()
        for thread in clients:
            thread.join()
    assert answers
    assert [answer for answer in answers if answer[0] != 200 or answer[1] != answer[2]] == []
    cluster.mend()
