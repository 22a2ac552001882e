"""A server whose every host is gone: what it refuses, and what becomes of the requests that it had taken."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.hosting import RunningHost, joining
from tests.process.test_hosts import LONG, PROMPT, ask, stream, text_of
from tests.serving import listening, nothing_used

WAIT_S = 0.1
WORKER = "baton.serve.worker"
STOPS_ITSELF = f"""
import os, signal, sys
if "{WORKER}" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
"""Python runs it at its start, so that a worker stops before it can be ready."""
ASKS_AFTER = 13
"""Requests to the server, with growing pauses: in all at least three times WAIT_S."""


def test_with_every_host_gone_requests_are_refused_until_one_comes() -> None:
    with listening("hash", "--hosts", "1") as server, server.client() as client:
        with joining(server.url, "a", "--mixed", "1", "--kv-blocks", "96") as host:
            server.wait_ready()
            text = text_of(ask(client, PROMPT))
            host.process.kill()
        server.wait_until(lambda state: not state["hosts"], reason="the only host is gone")
        for answer in (client.get("/ready"), client.post("/v1/completions", json=PROMPT)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            message = f"deserted, waiting for 1 of 1 hosts to join (baton host --join {server.url})"
            assert message in answer.json()["error"]["message"]
            assert float(answer.headers["retry-after"]) > 0
        server.wait_output("all hosts are gone; 0 requests wait for one")
        with joining(server.url, "b", "--mixed", "1", "--kv-blocks", "96"):
            server.wait_until(lambda _: client.get("/ready").status_code == 200, reason="a host is there again")
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
            server.wait_until(lambda state: state["workers"][0]["running"] == 1, reason="the first one runs")
            *_, last = stream(client, LONG, on_first=host.process.kill)
            asking.join()
        for error in (last["error"], whole[0].json()["error"]):
            assert (error["type"], error["code"]) == ("service_unavailable_error", "no_worker")
            assert "no worker was available for 0.5 s" in error["message"]
        assert (whole[0].status_code, whole[0].headers["retry-after"]) == (503, "1")
        assert server.metric("baton_requests_rejected_total", 'reason="no_worker"') == 2
        with joining(server.url, "b", "--mixed", "1"):
            server.wait_until(lambda _: client.get("/ready").status_code == 200, reason="a host is there again")
            server.wait_until(nothing_used, reason="no block is used")
            assert ask(client, PROMPT)["usage"]["completion_tokens"] == PROMPT["max_tokens"]


@dataclass
class Waiting:
    """A request waits, longer than `survival.wait_s` by now: its host is gone, and the next one's worker is held up."""

    late: RunningHost
    """The next one."""
    held_up: int
    """The process of its worker."""
    following: threading.Thread
    events: list[dict]
    """The last one of the request's stream, once that has ended."""

    def end(self) -> dict:
        self.following.join()
        return self.events[0]


@contextmanager
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    config, events = tmp_path / "impatient.toml", list[dict]()
    config.write_text(f"survival.wait_s = {WAIT_S}\n")
    (tmp_path / "sitecustomize.py").write_text(STOPS_ITSELF)
    with (
        listening("hash", "--hosts", "1", "--config", str(config)) as server,
        server.client() as client,
        joining(server.url, "b", "--mixed", "1", environment={"PYTHONPATH": str(tmp_path)}) as late,
    ):
        server.wait_until(lambda state: "b" in workers_of(state), reason="it has joined")
        server.wait_until(lambda _: bool(late.pids(WORKER)), reason="it starts a worker, which stops")
        (held_up,) = late.pids(WORKER)
        try:
            with joining(server.url, "a", "--mixed", "1") as gone:
                server.wait_ready()
                assert workers_of(server.cluster()) == {"a": "ready", "b": "starting"}
                following = threading.Thread(
                    target=lambda: events.extend([*stream(client, LONG, on_first=gone.process.kill)][-1:])
                )
                following.start()
                server.wait_until(lambda state: "a" not in workers_of(state), reason="the first host is gone")
                asks = itertools.count()
                server.wait_until(lambda _: next(asks) > ASKS_AFTER, reason="it waits for long")
                yield Waiting(late, held_up, following, events)
                following.join()
        finally:
            with suppress(ProcessLookupError):
                os.kill(held_up, signal.SIGKILL)  # one that was held up early does not end with its parent


def workers_of(state: dict) -> dict[str, str]:
    """The state of the one worker of each host."""
    return {worker["host"]: worker["state"] for worker in state["workers"]}


def test_a_host_that_has_begun_to_join_is_waited_for(tmp_path: Path) -> None:
    with waiting(tmp_path) as found:
        os.kill(found.held_up, signal.SIGCONT)
        assert found.end()["choices"][0]["finish_reason"] == "length"


def test_a_host_that_does_not_join_after_all_is_waited_for_no_longer(tmp_path: Path) -> None:
    with waiting(tmp_path) as found:
        found.late.process.kill()
        error = found.end()["error"]
        assert error["code"] == "no_worker"
        assert f"no worker was available for {WAIT_S} s" in error["message"]
