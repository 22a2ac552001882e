"""Service classes on a real server: a class that fills every place gives the reserved ones back at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.messages import RequestArrived, StartPrefill, StopRequest
from baton.serve.live.log_file import read_log
from tests.serving import RunningServer, nothing_used, serving

CONFIG = """
[batch]
requests_max = 4
[[classes]]
name = "premium"
priority = -1
prefill_ratio = 0.9
decode_ratio = 0.5
kv_ratio = 0.5
[[classes]]
name = "free"
[[routes]]
service_class = "premium"
headers = { "x-tier" = "premium" }
[[routes]]
service_class = "free"
path = "/v1/completions"
"""
CROWD, PREMIUM = 32, 3
LONG = {"prompt": "the crowd", "max_tokens": 1000, "ignore_eos": True, "n": CROWD, "stream": True}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classes") / "decisions.log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[RunningServer]:
    (log.parent / "baton.toml").write_text(CONFIG)
    config = ("--config", str(log.parent / "baton.toml"), "--log", str(log))
    with serving("hash", "--prefill", "1", "--decode", "1", *config) as running:
        yield running


def test_premium_requests_start_at_once_while_another_class_fills_every_place(server: RunningServer, log: Path) -> None:
    with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as crowd:
        lines = crowd.iter_lines()
        next(lines)  # every choice has been submitted by now
        for number in range(PREMIUM):
            body = {"prompt": f"premium {number}", "max_tokens": 4, "ignore_eos": True}
            headers = {"x-tier": "premium", "X-Request-Id": f"premium-{number}"}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    server.wait_until(nothing_used, reason="no blocks are used")
    at_once = paused = 0
    for decision in read_log(log)[1]:
        if isinstance(decision.event, RequestArrived) and decision.event.request.id.startswith("premium"):
            started = [command.request.id for command in decision.commands if isinstance(command, StartPrefill)]
            at_once += decision.event.request.id in started
            paused += any(isinstance(command, StopRequest) for command in decision.commands)
    assert at_once == PREMIUM
    assert paused == PREMIUM, "a request of the crowd gave its place back for each"
