"""A constrained request on real workers: handed off, killed, and still valid."""

from __future__ import annotations

import json
import os
import signal

import jsonschema_rs
import pytest

from tests.serving import serving

SCHEMA = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 150, "maxItems": 150}
BODY = {
    "prompt": "colours",
    "max_tokens": 3000,
    "seed": 11,
    "temperature": 1.0,
    "response_format": {"type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA}},
}


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_killed_worker_leaves_no_mark_in_a_constrained_text(victim: str) -> None:
    """INV-8: the next worker reads the tokens so far with a parser of its own. The text is that of a quiet run."""
    with serving("hash", "--prefill", "1", "--decode", "1") as server, server.client() as client:
        quiet = client.post("/v1/completions", json=BODY).json()["choices"][0]
        assert quiet["finish_reason"] == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(quiet["text"]))
        pids = {worker["id"]: worker["pid"] for worker in server.cluster()["workers"]}
        text, killed = "", False
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                if not killed and len(text) > 100:
                    os.kill(pids[victim], signal.SIGKILL)
                    killed = True
        assert killed
        assert text == quiet["text"]
