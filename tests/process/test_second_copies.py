"""kill -9 of a host under a decode whose class has second copies: the same text, and little is computed again."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.command_line import baton
from tests.hosting import cluster
from tests.serving import RunningServer

HOST = ("--mixed", "1", "--kv-blocks", "512")
LONG = {"prompt": "a decode with a second copy", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
CONFIG = """
default_class = "copied"
[[classes]]
name = "copied"
copy_tokens = 64
"""


def test_the_loss_of_a_host_costs_the_tokens_since_the_last_copy(tmp_path: Path, hash_server: RunningServer) -> None:
    path, log = tmp_path / "baton.toml", tmp_path / "decisions.log"
    path.write_text(CONFIG)
    with hash_server.client() as client:
        expected = client.post("/v1/completions", json=LONG).raise_for_status().json()["choices"][0]["text"]
    arguments = ("--config", str(path), "--log", str(log))
    with cluster("hash", {"a": HOST, "b": HOST}, *arguments) as (server, hosts), server.client() as client:
        text, killed, last = "", "", {}
        body, headers = {**LONG, "stream": True}, {"x-request-id": "asked"}
        with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                last = json.loads(line[6:])
                text += "".join(choice["text"] for choice in last["choices"])
                if not killed and len(text) > len(expected) // 3:
                    (killed,) = {w["id"].partition(".")[0] for w in server.cluster()["workers"] if w["running"]}
                    hosts[killed].process.kill()
        assert killed
        assert text == expected
        assert last["timings"]["attempts"] == 2
        read_tokens = server.metric("baton_failover_tokens_total", 'kv="read"')
        recomputed_tokens = server.metric("baton_failover_tokens_total", 'kv="recomputed"')
        server.stop()
    assert recomputed_tokens < read_tokens > 250
    # The second words stand there if the last copy was still landing when the host was lost.
    used = r"KV of \d+ blocks is cached on the host of|begins with KV of \d+ tokens"
    assert re.search(used, baton("explain", "asked", "--log", str(log)).stdout)
    assert "the same decisions" in baton("replay", str(log)).stdout
