"""A server whose every host is gone: what it refuses, and what becomes of the requests that it had taken."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from tests.hosting import joining
from tests.process.test_hosts import LONG, PROMPT, ask, nothing_used, stream, text_of, wait_until
from tests.serving import listening


def test_with_every_host_gone_requests_are_refused_until_one_comes() -> None:
    with listening("hash", "--hosts", "1") as server, server.client() as client:
        with joining(server.url, "a", "--mixed", "1", "--kv-blocks", "96") as host:
            server.wait_ready()
            text = text_of(ask(client, PROMPT))
            host.process.kill()
        wait_until(server, lambda state: not state["hosts"], what="the only host is gone")
        for answer in (client.get("/ready"), client.post("/v1/completions", json=PROMPT)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert "deserted" in answer.json()["error"]["message"]
            assert float(answer.headers["retry-after"]) > 0
        assert "all hosts are gone; 0 requests wait for one" in server.output()
        with joining(server.url, "b", "--mixed", "1", "--kv-blocks", "96"):
            wait_until(server, lambda _: client.get("/ready").status_code == 200, what="a host is there again")
            assert text_of(ask(client, PROMPT)) == text


def test_who_was_taken_before_every_host_went_is_told_when_none_comes(tmp_path: Path) -> None:
    """A stream ends with the error as its last event, a whole answer is a 503; nothing of them is left for the next."""
    config = tmp_path / "impatient.toml"
    config.write_text("survival.wait_s = 0.5\n")
    given = ("--hosts", "1", "--config", str(config))
    whole: list[httpx.Response] = []
    with listening("hash", *given) as server, server.client() as client:
        with joining(server.url, "a", "--mixed", "1") as host:
            server.wait_ready()
            asking = threading.Thread(target=lambda: whole.append(client.post("/v1/completions", json=LONG)))
            asking.start()
            wait_until(server, lambda state: state["workers"][0]["running"] == 1, what="the first one runs")
            *_, last = stream(client, LONG, on_first=host.process.kill)
            asking.join()
        for error in (last["error"], whole[0].json()["error"]):
            assert (error["type"], error["code"]) == ("service_unavailable_error", "no_worker")
            assert "no worker has been there for 0.5 s" in error["message"]
        assert (whole[0].status_code, whole[0].headers["retry-after"]) == (503, "1")
        assert server.metric("baton_requests_rejected_total", 'reason="no_worker"') == 2
        with joining(server.url, "b", "--mixed", "1"):
            wait_until(server, lambda _: client.get("/ready").status_code == 200, what="a host is there again")
            wait_until(server, nothing_used, what="no block is used")
            assert ask(client, PROMPT)["usage"]["completion_tokens"] == PROMPT["max_tokens"]
