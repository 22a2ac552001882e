"""`baton serve --log-format json` writes nothing but JSON, and no text of a prompt."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from tests.serving import FLAGS, NO_TLS, end

SECRET = "the secret of the prompt"


def lines_until(output: Iterator[str], message: str) -> list[dict[str, Any]]:
    """Read lines up to one whose message begins so."""
    lines: list[dict[str, Any]] = []
    for text in output:
        lines.append(json.loads(text))
        if lines[-1]["message"].startswith(message):
            return lines
    raise AssertionError(f"no line {message!r}: {lines}")


def test_a_request_is_found_by_its_id_and_no_prompt_is_logged() -> None:
    command = [sys.executable, "-m", "baton.cli.main", "serve", "hash", "--mixed", "1", "--log-format", "json", *FLAGS]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        ready = lines_until(server.stdout, "ready: ")[-1]
        assert (ready["level"], ready["time"][10]) == ("info", "T")
        with httpx.Client(
            base_url=ready["message"].split()[1], verify=NO_TLS, headers={"x-request-id": "mine"}
        ) as client:
            client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 3, "unknown": 1}).raise_for_status()
            assert client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": SECRET}).status_code == 400
            client.get("/v1/nothing")
        server.send_signal(signal.SIGTERM)
        lines = lines_until(server.stdout, "shutting down")
    finally:
        end(server)
        server.stdout.close()
    [ended] = [line for line in lines if line["message"] == "request ended"]
    assert ended["request_id"].startswith("mine")
    assert (ended["outcome"], ended["prompt_tokens"], ended["output_tokens"]) == ("finished", len(SECRET), 3)
    assert ended["ttft_s"] > 0
    responses = [(line["request_id"], line["status"]) for line in lines if line["message"] == "response"]
    assert responses == [("mine", 200), ("mine", 400), ("mine", 404)]
    assert any("unknown field unknown" in line["message"] for line in lines)
    assert SECRET not in json.dumps(lines)
