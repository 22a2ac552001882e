"""A real Prometheus scrapes a real server: the rules are valid and quiet, and every panel has values."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.serving import POLL_S, POLLS_MAX, serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MISSING = [program for program in ("prometheus", "promtool") if shutil.which(program) is None]

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {' and '.join(MISSING)} on PATH; on Debian: apt-get install prometheus"
    ),
]

RARE = (
    "baton_requests_rejected_total",
    "baton_http_refusals_total",
    "baton_tier_blocks_total",
    "baton_prediction",
    "baton_class",
    "baton_tenant",
)
"""Series of events that this load does not have."""


def promtool(*arguments: str, stdin: bytes = b"") -> str:
    done = subprocess.run(["promtool", *arguments], cwd=ROOT, input=stdin, capture_output=True, check=False)
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, output
    return output


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[httpx.Client]:
    """Run Prometheus with the shipped configuration, but for the target and the interval."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    for theirs, ours in (("127.0.0.1:8000", target), (": 15s", ": 1s"), (": 5s", ": 1s")):
        assert theirs in text
        text = text.replace(theirs, ours)
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            ["prometheus", *arguments, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=output
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def query(client: httpx.Client, expression: str) -> list[dict]:
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def wait_for(client: httpx.Client, expression: str) -> list[dict]:
    """Return the first result of a query that has one."""
    pause = threading.Event()
    for _ in range(POLLS_MAX):
        try:
            found = query(client, expression)
        except (httpx.TransportError, json.JSONDecodeError):  # it has not started
            found = []
        if found:
            return found
        pause.wait(POLL_S)
    raise AssertionError(f"never a result: {expression}")


def test_the_rules_fire_on_their_series() -> None:
    assert "SUCCESS" in promtool("test", "rules", "tests/data/alerts_test.yml")
    assert "11 rules found" in promtool("check", "config", "deploy/prometheus/prometheus.yml")


def test_prometheus_scrapes_a_server(tmp_path: Path) -> None:
    with serving("hash", "--metrics-names", "vllm") as server, server.client() as client:
        lines = client.get("/metrics").content.splitlines(keepends=True)
        own = b"".join(line for line in lines if b"vllm:" not in line)  # the linter wants no colon in a name
        assert 0 < len(own) < sum(map(len, lines))
        promtool("check", "metrics", stdin=own)
        with prometheus(server.url.removeprefix("http://"), tmp_path) as prom:
            wait_for(prom, 'up{job="baton"} == 1')
            scraped = 'count_over_time(baton_requests_total{outcome="finished"}[1m])'
            for _ in range(3):
                before = float(wait_for(prom, scraped)[0]["value"][1])
                body = {"prompt": "a prompt of some length", "max_tokens": 20, "ignore_eos": True}
                client.post("/v1/completions", json=body).raise_for_status()
                wait_for(prom, f"{scraped} > {before + 1}")  # so that rates have a slope
            for panel in json.loads((DEPLOY / "grafana" / "baton.json").read_text())["panels"]:
                for target in panel["targets"]:
                    expression = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
                    found = query(prom, expression)
                    assert found or any(name in expression for name in RARE), (panel["title"], expression)
            generated = query(prom, "sum(baton_generation_tokens_total)")[0]["value"][1]
            theirs = query(prom, 'vllm:generation_tokens_total{model_name="hash", engine="0"}')[0]["value"][1]
            assert generated == theirs == "60"
            rules = prom.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
            assert [rule["name"] for rule in rules if rule["health"] == "err" or rule["state"] == "firing"] == []
