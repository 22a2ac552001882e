"""A real server with a small arena and a spill space: prompts of four arenas give the text of a large arena."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import RunningServer, serving

SPILL = """
[kv]
blocks = 16
[kv.spill]
bytes = {bytes}
folder = "{folder}"
tokens_per_s_min = {rate}
"""
ARENA_TOKENS = 16 * 16


def ask(server: RunningServer, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] >= 4 * ARENA_TOKENS
    return answer["choices"][0]["text"]


@pytest.mark.parametrize("model", ["hash", "floats"])
def test_a_prompt_of_four_arenas_gives_the_text_of_a_large_arena(
    model: str, tmp_path: Path, tiny_model: str, tiny_server: RunningServer, hash_server: RunningServer
) -> None:
    """INV-8: the prompt's KV goes through the file on both workers; the large arena holds it."""
    ample, arguments = (
        (hash_server, ("hash",)) if model == "hash" else (tiny_server, (tiny_model, "--dtype", "float32"))
    )
    prompt = "a long story of a ship that found an island " * 25
    config = tmp_path / "baton.toml"
    config.write_text(SPILL.format(bytes=16_000_000, folder=tmp_path / "spill", rate=1))
    with serving(*arguments, "--config", str(config)) as small:
        assert ask(small, prompt) == ask(ample, prompt)
        assert small.metric("baton_kv_blocks", 'tier="spill"') > 16
        assert small.metric("baton_kv_blocks", 'tier="spill",state="used"') == 0, "slots are free after the request"


def test_without_a_spill_space_the_prompt_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text("[kv]\nblocks = 16\n")
    with serving("hash", "--mixed", "1", "--config", str(config)) as server, server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "x" * 1000})
        assert answer.status_code == 400
        assert "kv.spill" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("size", "rate", "words"),
    [(8, 1, "kv.spill.bytes is 8, but an arena of 16 blocks needs at least"), (16_000_000, 1e9, "tokens/s allow")],
)
def test_sizes_that_do_not_fit_together_are_refused_at_the_start(
    size: int, rate: float, words: str, tmp_path: Path
) -> None:
    config = tmp_path / "baton.toml"
    config.write_text(SPILL.format(bytes=size, folder=tmp_path, rate=rate))
    command = [sys.executable, "-m", "baton.cli.main", "serve", "hash", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr
