"""A real server admits by what its workers have shown, not by the prices that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import RunningServer, serving

BODY = {"prompt": "The harbour lies", "max_tokens": 4, "ignore_eos": True}
LONG = BODY | {"max_tokens": 1500, "n": 16, "stream": True}
REQUESTS = 20
ATTEMPTS_MAX = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """By its prices every step takes ten seconds, so each request would miss its SLO by far."""
    config = Path(tmp_path_factory.mktemp("admission")) / "baton.toml"
    config.write_text("[slo]\nttft_s = 5.0\ntpot_s = 2.0\n[cost]\nstep_overhead_s = 10.0\nprefill_token_s = 1.0\n")
    with serving("hash", "--mixed", "1", "--config", str(config)) as running:
        yield running


def test_an_idle_server_with_wrong_prices_refuses_nothing(server: RunningServer) -> None:
    with server.client() as client:
        statuses = [client.post("/v1/completions", json=BODY).status_code for _ in range(REQUESTS)]
        metrics = client.get("/metrics").text
    assert statuses == [200] * REQUESTS
    counts = [line for line in metrics.splitlines() if line.startswith("baton_prediction_error_ratio_count")]
    assert {'latency="ttft"', 'latency="tpot"'} == {line.split("{")[1].split("}")[0] for line in counts}
    assert all(float(line.split()[-1]) == REQUESTS for line in counts)


def test_a_busy_server_has_learned_its_prices_and_admits(server: RunningServer) -> None:
    with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as running:
        lines = running.iter_lines()
        next(lines)
        assert client.post("/v1/completions", json=BODY).status_code == 200


def refusal(server: RunningServer, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """Ask while other requests run, again until they have not ended before. An idle server refuses nothing."""
    with server.client() as client:
        for _ in range(ATTEMPTS_MAX):
            with client.stream("POST", "/v1/completions", json=LONG) as running:
                lines = running.iter_lines()  # kept: without it, httpx would close the stream
                next(lines)
                answer = client.post("/v1/completions", json=body, headers=headers)
                if answer.status_code != 200:
                    return answer
    raise AssertionError(f"admitted {ATTEMPTS_MAX} times")


def test_a_refusal_comes_with_figures_and_a_time_to_retry(server: RunningServer) -> None:
    refused = refusal(server, BODY, {"x-slo-ttft-ms": "0.001"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "slo"
    assert "the first token is predicted after 0." in error["message"]
    assert "send the request later" in error["message"]


def test_a_target_in_the_body_counts_as_one_in_a_header(server: RunningServer) -> None:
    refused = refusal(server, BODY | {"slo": {"tpot_s": 1e-7}}, {})
    assert refused.status_code == 503
    assert "a token is predicted every 0." in refused.json()["error"]["message"]
