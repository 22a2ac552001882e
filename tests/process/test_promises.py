"""A server that nobody told what steps cost keeps promises that its engine can keep."""

from __future__ import annotations

from pathlib import Path

from tests.serving import serving


def test_an_idle_server_takes_what_its_engine_can_do(tmp_path: Path) -> None:
    """The prices of the torch engine, in float32 on one core, refused all of it: 45 ms a token."""
    config = tmp_path / "baton.toml"
    config.write_text("[slo]\nttft_s = 5.0\ntpot_s = 0.04\n")
    with serving("--mixed", "1", "--config", str(config)) as server, server.client() as client:
        body = {"prompt": "The harbour lies", "max_tokens": 4, "temperature": 0}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"]
