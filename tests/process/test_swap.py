"""Requests that give way in a real server, with a tier below its arena: they are read back, and say the same."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.serving import RunningServer, serving

TIGHT = """
[kv]
blocks = {blocks}
preemption = "swap"
[batch]
growth_tokens = 4
"""


ROUNDS_MAX = 20
"""On a busy machine, blocks may be evicted before they are in the file: then a round reads none back."""


def ask_all(server: RunningServer, number: int, requests: int, output_tokens: int) -> tuple[list[str], int]:
    """Ask for so many texts at once, in round `number`. Returns them, and how often their requests were preempted."""
    texts, preemptions = [""] * requests, [0] * requests
    together = threading.Barrier(requests)

    def ask(index: int) -> None:
        body = {"max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
        with server.client() as client:
            together.wait()
            prompt = f"{number}.{index}: the story of a ship that found an island which was on no map"
            answer = client.post("/v1/completions", json={**body, "prompt": prompt}).json()
        texts[index] = answer["choices"][0]["text"]
        preemptions[index] = answer["timings"].get("preemptions", 0)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts, sum(preemptions)


@pytest.mark.parametrize(
    ("model", "blocks", "requests", "output_tokens"), [("hash", 48, 8, 200), ("floats", 20, 5, 100)]
)
def test_a_tiny_arena_with_swap_gives_the_texts_of_an_ample_one(
    model: str,
    blocks: int,
    requests: int,
    output_tokens: int,
    tmp_path: Path,
    tiny_model: str,
    tiny_server: RunningServer,
    hash_server: RunningServer,
) -> None:
    """INV-8: decoding goes on at the token where it stopped, on KV that was in a file meanwhile."""
    ample, arguments = (
        (hash_server, ("hash",)) if model == "hash" else (tiny_server, (tiny_model, "--dtype", "float32"))
    )
    config = tmp_path / "baton.toml"
    config.write_text(TIGHT.format(blocks=blocks))
    tier = f"file://{tmp_path / 'kv'}?bytes=256e6&io=buffered"
    with serving(*arguments, "--mixed", "1", "--config", str(config), "--tier", tier) as tight:
        preemptions = 0
        for number in range(ROUNDS_MAX):
            expected, preempted = ask_all(ample, number, requests, output_tokens)
            assert preempted == 0
            texts, preempted = ask_all(tight, number, requests, output_tokens)
            assert texts == expected
            preemptions += preempted
            if tight.metric("baton_read_back_blocks_total"):
                break
        assert tight.metric("baton_preemptions_total") == preemptions > 0
        assert tight.metric("baton_read_back_blocks_total") > 0


def test_swap_without_a_tier_is_refused_at_the_start(tmp_path: Path) -> None:
    """It would compute everything again, and nobody would know."""
    config = tmp_path / "baton.toml"
    config.write_text(TIGHT.format(blocks=48))
    command = [sys.executable, "-m", "baton.cli.main", "serve", "hash", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "kv.preemption is 'swap', but there are 0 tiers to read from: add --tier URL" in done.stderr
