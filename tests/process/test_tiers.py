"""A file tier below the arena of a real server: what one run has written serves the next, and damage is a miss."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.serving import RunningServer, serving

PROMPT = "What one run has computed, another need not compute again. " * 12
BLOCK_TOKENS = 16
BLOCKS = len(PROMPT) // BLOCK_TOKENS
ASKS_MAX = 3000
PAGE_BYTES = 4096


def tier_blocks(server: RunningServer, outcome: str) -> float:
    """Sum one outcome of `baton_tier_blocks_total`."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    wanted = [line for line in lines if line.startswith("baton_tier_blocks_total{") and f'outcome="{outcome}"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)


def complete(server: RunningServer) -> tuple[str, int]:
    """Ask for a text. Returns it, and how many tokens of the prompt were not computed for it."""
    with server.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()
    return answer["choices"][0]["text"], answer["timings"]["cached_tokens"]


def wait_stored(server: RunningServer, blocks: int) -> None:
    for _ in range(ASKS_MAX):
        if tier_blocks(server, "stored") >= blocks:
            return
    raise AssertionError(f"{tier_blocks(server, 'stored')} blocks were stored, {blocks} should be\n{server.output}")


def kill(server: RunningServer) -> None:
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()


def damage(folder: Path) -> None:
    """Flip a bit in every block, and in no header: the files look whole until they are read."""
    segment = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with segment.open("r+b") as file:
        for place in range(0, segment.stat().st_size, PAGE_BYTES):
            file.seek(place)
            page = file.read(PAGE_BYTES)
            if any(page) and not page.startswith(b"BATONKV1"):
                file.seek(place)
                file.write(bytes([page[0] ^ 0x10]))


def test_a_file_tier_outlives_kill_9_and_damage_costs_a_recompute(tmp_path: Path) -> None:
    arguments = ("hash", "--mixed", "1", "--kv-blocks", "96", "--tier", f"file://{tmp_path}?bytes=64e6&io=buffered")
    with serving(*arguments) as server:
        text, cached = complete(server)
        assert cached == 0
        wait_stored(server, BLOCKS)
        kill(server)
    whole_blocks = (len(PROMPT) - 1) // BLOCK_TOKENS
    with serving(*arguments) as server:
        assert complete(server) == (text, whole_blocks * BLOCK_TOKENS)
        assert (tier_blocks(server, "loaded"), tier_blocks(server, "missed")) == (whole_blocks, 0)
        kill(server)
    damage(tmp_path)
    with serving(*arguments) as server:
        assert complete(server) == (text, 0), "a damaged block is a miss: the whole prompt is computed"
        assert tier_blocks(server, "missed") == tier_blocks(server, "damaged") == whole_blocks
