"""Workers of different kinds, live: each host states its own, and routing uses the prices of that kind."""

from __future__ import annotations

from pathlib import Path

from tests.command_line import baton
from tests.hosting import cluster

KINDS = """
[cost.kinds.cpu]
prefill_token_s = 0.01
[cost.kinds.gpu]
prefill_token_s = 0.00001
"""
HOST = ("--mixed", "1", "--kv-blocks", "256", "--kind")
PROMPTS = 6


def test_prompts_go_to_the_worker_of_the_faster_kind(tmp_path: Path) -> None:
    """Among equal workers, the first one in order of names would get them: that of host `a`."""
    path = tmp_path / "baton.toml"
    path.write_text(KINDS)
    with cluster("hash", {"a": (*HOST, "cpu"), "b": (*HOST, "gpu")}, "--config", str(path)) as (server, _):
        with server.client() as client:
            for number in range(PROMPTS):
                body = {"prompt": f"{number} " + "a long prompt " * 20, "max_tokens": 2}
                client.post("/v1/completions", json=body).raise_for_status()
        assert server.metric("baton_prompts_total", 'kind="gpu"') == PROMPTS
        assert server.metric("baton_prompts_total", 'kind="cpu"') == 0
        done = baton("host", "--join", server.url, "--name", "c", *HOST, "gpus")
    assert done.returncode == 2
    assert "--kind is 'gpus', which cost.kinds does not have" in done.stderr
    assert "known: cpu, gpu" in done.stderr
