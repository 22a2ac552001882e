"""`baton restart --hosts` under load: each agent starts its program again, and every request has its text."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from baton.cli.main import main
from tests.hosting import MendableCluster
from tests.serving import listening

CLIENTS, PROMPTS = 4, 4
HOST = ("--mixed", "1", "--kv-blocks", "512")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MendableCluster]:
    """A server without workers and two hosts. A request whose worker is lost fails."""
    config = tmp_path_factory.mktemp("rolling") / "baton.toml"
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


def test_every_host_and_worker_restarts_and_no_request_fails(
    cluster: MendableCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    server, answers, is_over = cluster.server, list[tuple[int, str, str]](), threading.Event()
    with server.client() as client:
        texts = [client.post("/v1/completions", json=body(n)).json()["choices"][0]["text"] for n in range(PROMPTS)]
    agents, workers = {name: host.process.pid for name, host in cluster.hosts.items()}, server.worker_pids()

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
        server.wait_until(is_serving, reason="requests run")
        assert main(["restart", "--hosts", "--url", server.url]) == 0
    finally:
        is_over.set()
        for thread in clients:
            thread.join()
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "every worker is back"
    assert {"restarting host a", "restarting host b"} <= set(said)
    assert {name: host.process.pid for name, host in cluster.hosts.items()} == agents, (
        "the same process, as systemd sees"
    )
    assert all(host.process.poll() is None for host in cluster.hosts.values())
    assert not set(workers) & set(server.worker_pids())
    assert answers
    assert [answer for answer in answers if answer[0] != 200 or answer[1] != answer[2]] == []
    cluster.mend()


def test_a_drained_host_ends(cluster: MendableCluster) -> None:
    agent = cluster.hosts["a"].process
    with cluster.server.client() as client:
        client.post("/cluster/hosts/a/drain", json={}).raise_for_status()
    assert agent.wait(60) == 0
    cluster.mend()
