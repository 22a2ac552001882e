"""kill -9 of a host under a decode whose class has second copies: the same text, and little is computed again."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.command_line import baton
from tests.hosting import RunningHost, cluster
from tests.serving import RunningServer

HOST = ("--mixed", "1", "--kv-blocks", "512")
REAL_HOST = (*HOST, "--threads", "1")
LONG = {"prompt": "a decode with a second copy", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
REAL = {"prompt": "The second copy of a decode. " * 30, "max_tokens": 96, "ignore_eos": True, "temperature": 0}
CONFIG = """
default_class = "copied"
[[classes]]
name = "copied"
copy_tokens = {copy_tokens}
"""
COPY_TOKENS, BLOCK_TOKENS = 64, 16


class Cut:
    """A stream under which its host is killed once so many characters have come, and so many tokens are copied.

    The worker is stopped until then: on a busy machine the hash engine would be many tokens ahead of the copies.
    """

    def __init__(
        self, server: RunningServer, hosts: dict[str, RunningHost], body: dict, *, characters: int, copied_tokens: int
    ) -> None:
        def is_copied(state: dict) -> bool:
            (other,) = [host for host in state["hosts"] if host["id"] != self.killed]
            return other["kv_blocks_cached"] * BLOCK_TOKENS >= copied_tokens

        self.text, self.last, self.killed = "", {}, ""
        headers = {"x-request-id": "asked"}
        with (
            server.client(timeout_s=300) as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=headers) as response,
        ):
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                self.last = json.loads(line[6:])
                self.text += "".join(choice["text"] for choice in self.last["choices"])
                if not self.killed and len(self.text) > characters:
                    (worker,) = [each for each in server.cluster()["workers"] if each["running"]]
                    self.killed = worker["id"].partition(".")[0]
                    os.kill(worker["pid"], signal.SIGSTOP)
                    server.wait_until(is_copied, reason="the tokens are copied")
                    hosts[self.killed].process.kill()
        self.read_tokens, self.recomputed_tokens = [
            server.metric("baton_failover_tokens_total", f'kv="{kind}"') for kind in ("read", "recomputed")
        ]


def test_the_loss_of_a_host_costs_the_tokens_since_the_last_copy(tmp_path: Path, hash_server: RunningServer) -> None:
    path, log = tmp_path / "baton.toml", tmp_path / "decisions.log"
    path.write_text(CONFIG.format(copy_tokens=COPY_TOKENS))
    with hash_server.client() as client:
        expected = client.post("/v1/completions", json=LONG).raise_for_status().json()["choices"][0]["text"]
    arguments = ("--config", str(path), "--log", str(log))
    with cluster("hash", {"a": HOST, "b": HOST}, *arguments) as (server, hosts):
        cut = Cut(server, hosts, LONG, characters=len(expected) // 3, copied_tokens=len(expected) // 3)
        server.stop()
    assert cut.killed
    assert cut.text == expected
    assert cut.last["timings"]["attempts"] == 2
    assert cut.recomputed_tokens < cut.read_tokens > 250
    # The second words stand there if the last copy was still landing when the host was lost.
    used = r"KV of \d+ blocks is cached on the host of|begins with KV of \d+ tokens"
    assert re.search(used, baton("explain", "asked", "--log", str(log)).stdout)
    assert "the same decisions" in baton("replay", str(log)).stdout


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_the_real_model_computes_no_prompt_again_that_a_second_copy_holds(tmp_path: Path) -> None:
    """The other host computes at most the tokens since the last copy, and the copy under way at that moment."""
    path, copy_tokens = tmp_path / "baton.toml", BLOCK_TOKENS
    path.write_text(CONFIG.format(copy_tokens=copy_tokens))
    with cluster("smollm2-135m", {"a": REAL_HOST, "b": REAL_HOST}, "--config", str(path)) as (server, hosts):
        cut = Cut(server, hosts, REAL, characters=120, copied_tokens=160)
        with server.client(timeout_s=300) as client:
            again = client.post("/v1/completions", json=REAL).raise_for_status().json()
    assert cut.killed
    assert cut.text == again["choices"][0]["text"]
    assert cut.read_tokens >= again["usage"]["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    assert cut.recomputed_tokens <= 3 * copy_tokens + BLOCK_TOKENS
