"""Tenants share a server by default once there are several keys: the queue of one does not hold up another."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx

from baton.core.messages import RequestArrived, StartPrefill
from baton.serve.live.log_file import read_log
from tests.serving import serving

CROWD = 32
"""Choices of one HTTP request, as many as there may be."""
CONFIG = """
[batch]
requests_max = 1
[http]
api_keys = ["crowd", "single"]
"""
SINGLE = "single-request"


def asked(client: httpx.Client, key: str, prompts: list[str], *, stream: bool) -> httpx.Request:
    return client.build_request(
        "POST",
        "/v1/completions",
        json={"prompt": prompts, "max_tokens": 1000 if stream else 4, "ignore_eos": True, "stream": stream},
        headers={"Authorization": f"Bearer {key}", "X-Request-Id": SINGLE if key == "single" else "crowd"},
    )


def test_one_request_passes_the_queue_of_another_tenant(tmp_path: Path) -> None:
    """32 requests of one tenant are there. In a queue by arrival all of them would come first."""
    (tmp_path / "serve.toml").write_text(CONFIG)
    log = tmp_path / "decisions.log"
    arguments = ("--prefill", "1", "--decode", "1", "--config", str(tmp_path / "serve.toml"), "--log", str(log))
    with serving("hash", *arguments) as server, server.client() as client, ExitStack() as streams:
        prompts = [f"{place} of the crowd" for place in range(CROWD)]
        answer = client.send(asked(client, "crowd", prompts, stream=True), stream=True)
        streams.callback(answer.close)
        lines = answer.iter_lines()
        next(lines)  # every choice has been submitted by now
        response = client.send(asked(client, "single", ["alone"], stream=False))
        assert response.status_code == 200, response.text
    arrived: list[str] = []
    started: list[str] = []
    passed: list[str] | None = None
    for decision in read_log(log)[1]:
        if isinstance(decision.event, RequestArrived):
            arrived.append(decision.event.request.id)
            if arrived[-1].startswith(SINGLE):
                assert len(arrived) - len(started) > CROWD // 2, "most of the crowd waits when the single request comes"
                passed = []
        turns = [command.request.id for command in decision.commands if isinstance(command, StartPrefill)]
        started += turns
        if passed is not None:
            passed += turns
        if any(name.startswith(SINGLE) for name in turns):
            break
    assert passed is not None
    assert len(passed) <= 2, f"only one that was before it when the counters were equal: {passed}"
