"""The first token left to decode, on real hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosting import cluster
from tests.process.test_hosts import DECODE, PREFILL, ask, text_of
from tests.serving import RunningServer, nothing_used


@pytest.mark.parametrize("model", ["hash", "floats"])
def test_a_first_token_that_is_left_to_decode_is_the_same(
    model: str, hash_server: RunningServer, tiny_server: RunningServer, tiny_model: str, tmp_path: Path
) -> None:
    """INV-8, and the prompt that comes again goes over without a step of prefill. The timings say who did what."""
    path = tmp_path / "baton.toml"
    path.write_text('[policy.first_token]\nuse = "first-token-by-decode"\n')
    bodies = [
        {"prompt": "Once upon a time, in a small village, ", "max_tokens": 12, "temperature": 0.9, "seed": 7},
        {"prompt": "A list of the longest rivers in Europe:", "max_tokens": 12, "temperature": 0},
        {"prompt": "A list of the longest rivers in Europe:", "max_tokens": 12, "temperature": 0},
    ]
    with (hash_server if model == "hash" else tiny_server).client() as client:
        expected = [text_of(ask(client, body)) for body in bodies]
    given = ("--dtype", "float32", "--config", str(path))
    with (
        cluster("hash" if model == "hash" else tiny_model, {"a": PREFILL, "b": DECODE}, *given) as (server, _),
        server.client() as client,
    ):
        answers = [ask(client, body) for body in bodies]
        assert [text_of(answer) for answer in answers] == expected
        for timings in (answer["timings"] for answer in answers):
            assert (timings["prefill_worker"], timings["decode_worker"]) == ("a.prefill-0", "b.decode-0")
            assert timings["prefill_s"] + timings["handoff_s"] <= timings["ttft_s"]
        server.wait_until(nothing_used, reason="no block is used")
