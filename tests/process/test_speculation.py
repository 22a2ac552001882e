"""Guessing ahead on a real server: the same text with and without, whatever shapes the draw, and through a death."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import RunningServer, serving

REPEATS = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 60, "maxItems": 60}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "colours", "schema": REPEATS}}
BODIES: list[dict[str, Any]] = [
    {"prompt": "abcabcabc", "temperature": 0},
    {"prompt": "once upon a time", "seed": 4, "temperature": 1.5, "logprobs": 2},
    {"prompt": "xyxyxyxy", "seed": 5, "top_p": 0.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"prompt": "say it again", "seed": 6, "stop": ["a", "Q"], "min_tokens": 60},
    {"prompt": "colours", "seed": 7, "response_format": SCHEMA, "max_tokens": 900},
    {"prompt": "words", "seed": 8, "guided_regex": "(la|lu){200}", "n": 2, "max_tokens": 900},
]


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = tmp_path_factory.mktemp("speculation") / "baton.toml"
    config.write_text("[speculation]\ntokens_max = 6\nngram_min = 1\nrequests_max = 64\n")
    with serving("hash", "--prefill", "1", "--decode", "2", "--config", str(config)) as server:
        yield server


def _choices(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"max_tokens": 200, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body["prompt"])
def test_the_answer_is_that_without_guesses(
    guessing: RunningServer, hash_server: RunningServer, body: dict[str, Any]
) -> None:
    assert _choices(guessing, body) == _choices(hash_server, body)


def test_guesses_come_true_and_are_counted(guessing: RunningServer) -> None:
    """Under a grammar that leaves one continuation, every guess does."""
    before = guessing.metric("baton_step_seconds_count")
    (choice,) = _choices(guessing, {"prompt": "x", "guided_regex": "(hello world ){20}", "max_tokens": 900})
    assert choice["text"] == "hello world " * 20
    assert guessing.metric("baton_step_seconds_count") - before < 120  # of 241 tokens
    accepted = guessing.metric("baton_speculation_accepted_tokens_total")
    assert 120 < accepted <= guessing.metric("baton_speculation_drafted_tokens_total")


def test_a_death_in_the_middle_of_a_guess_changes_nothing(guessing: RunningServer, hash_server: RunningServer) -> None:
    """INV-8: what a killed worker guessed is nowhere; the next one guesses from the same text."""
    body = {**BODIES[4], "prompt": "more colours"}
    (quiet,) = _choices(hash_server, body)
    before = guessing.metric("baton_speculation_accepted_tokens_total")
    pids = {worker["id"]: worker["pid"] for worker in guessing.cluster()["workers"]}
    text, last, killed = "", {}, False
    with (
        guessing.client() as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream,
    ):
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line[6:])
            text += last["choices"][0]["text"]
            if not killed and len(text) > 40:
                os.kill(pids["decode-0"], signal.SIGKILL)
                os.kill(pids["decode-1"], signal.SIGKILL)
                killed = True
    assert killed
    assert text == quiet["text"]
    assert guessing.metric("baton_speculation_accepted_tokens_total") > before
