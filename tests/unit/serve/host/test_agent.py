"""The output of an agent that cannot join, and when it gives up."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import uvloop

from baton.core.config import Config, ParallelConfig, Topology
from baton.core.errors import ConfigError
from baton.serve.host.agent import Agent, HostOptions, _config
from baton.serve.messages.hosting import HostTerms


def options(url: str, join_wait_s: float = 300.0) -> HostOptions:
    return HostOptions(
        url=url,
        name="a",
        model="",
        topology=Topology(mixed=1),
        tensor=None,
        pipeline=None,
        device="cpu",
        kind="",
        threads=0,
        kv_blocks=0,
        block_tokens=0,
        kv_dtype=None,
        tiers=(),
        listen="",
        advertise="",
        api_key=None,
        join_wait_s=join_wait_s,
    )


@contextmanager
def answering(*answers: tuple[int, str]) -> Iterator[str]:
    """Run a server that gives these answers, one after the other. Yields its URL."""
    left = iter(answers)

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, words = next(left)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(words.encode())

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_each_new_reason_is_told_once_with_how_long_it_is_waited_for() -> None:
    told: list[str] = []
    with answering((503, "loading"), (503, "loading"), (503, "it ends"), (404, "no such path")) as url:
        with pytest.raises(ConfigError, match="no such path"):
            asyncio.run(Agent(options(url), tell=told.append).run())
        assert [line.partition("; trying again for ")[0] for line in told] == [
            f"{url} answers 503: loading",
            f"{url} answers 503: it ends",
        ]
    assert all(0 < float(line.split()[-2]) <= 300 for line in told)


def test_without_a_server_it_ends_with_1() -> None:
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert asyncio.run(Agent(options(url, join_wait_s=0.0), tell=told.append).run()) == 1
    assert told[-1].startswith(f"given up after 0 s: there is no server at {url}")


@pytest.mark.parametrize("known", ["nothing", "terms"])
def test_a_signal_ends_an_agent_that_waits_for_the_name_server(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver cannot be interrupted: no step of the end may wait for it."""
    released, resolve = threading.Event(), socket.getaddrinfo

    def resolve_slowly(host: object, *args: object, **named: object) -> object:
        if host != "slow.invalid":
            return resolve(host, *args, **named)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGTERM)
        released.wait()
        raise OSError("released")

    def given_terms(_url: str, _key: str | None) -> HostTerms:
        return HostTerms(port=1, token="", tls=False, mover_secret=b"", config=Config(model="hash"))

    monkeypatch.setattr(socket, "getaddrinfo", resolve_slowly)
    if known == "terms":
        monkeypatch.setattr("baton.serve.host.agent.request_terms", given_terms)
    watchdog = threading.Timer(60.0, released.set)
    watchdog.start()
    told: list[str] = []
    assert uvloop.run(Agent(options("http://slow.invalid:8000"), tell=told.append).run()) == 0
    assert not released.is_set(), "it has waited for the name server"
    assert not told
    watchdog.cancel()
    released.set()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ParallelConfig(tensor=4, pipeline=2, context=2, experts=True, overlap_tokens_min=9)),
        ({"tensor": 4, "pipeline": 1}, ParallelConfig(tensor=4, context=2, experts=True, overlap_tokens_min=9)),
        ({"tensor": 2}, ParallelConfig(tensor=2, pipeline=2, experts=True, overlap_tokens_min=9)),
        ({"tensor": 1}, ParallelConfig(pipeline=2)),
    ],
)
def test_a_host_with_other_ranks_divides_no_context_among_them(given: dict, expected: ParallelConfig) -> None:
    """Their number may not fit `--dcp` or `--dp`, which a host takes from the server."""
    parallel = ParallelConfig(tensor=4, pipeline=2, context=2, experts=True, overlap_tokens_min=9)
    terms = HostTerms(port=1, token="", tls=False, mover_secret=b"", config=Config(parallel=parallel))
    assert _config(terms, replace(options("http://a"), **given)).parallel == expected
