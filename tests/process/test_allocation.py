"""Blocks on demand or for the longest output: what a short KV cache does with either."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.serving import RunningServer, serving

REQUESTS = 8
BODY = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}


def _texts(server: RunningServer) -> list[str]:
    texts = [""] * REQUESTS

    def ask(index: int) -> None:
        with server.client() as client:
            answer = client.post("/v1/completions", json={**BODY, "prompt": f"request {index}: {'x' * 30}"})
            texts[index] = answer.json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(REQUESTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


@pytest.mark.parametrize(("allocate", "preempts"), [("on_demand", True), ("longest", False)])
def test_only_requests_that_grow_are_preempted(
    allocate: str, preempts: bool, hash_server: RunningServer, tmp_path: Path
) -> None:
    """Three requests fit at their longest; on demand more run at first, and some give way. The texts are the same."""
    config = tmp_path / "baton.toml"
    config.write_text(f'[kv]\nblocks = 48\nallocate = "{allocate}"\n[batch]\ngrowth_tokens = 4\n')
    with serving("hash", "--mixed", "1", "--config", str(config)) as server:
        assert _texts(server) == _texts(hash_server)
        assert (server.metric("baton_preemptions_total") > 0) is preempts
