"""Who may join a server, and what those are told that may not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.hosting import joining
from tests.serving import RunningServer, listening


def wait_for_hosts(server: RunningServer, count: int) -> None:
    server.wait_until(lambda state: len(state["hosts"]) == count, reason=f"{count} hosts have joined")


def test_hosts_that_cannot_join_are_refused_with_the_reason(tmp_path: Path) -> None:
    """A second host of a name, a foreign model, a small arena, an address of no machine (RFC 5737), a wrong path."""
    config = tmp_path / "baton.toml"
    config.write_text("[hosts]\nsilent_s = 2.0\n")  # the second host tries for 3 s
    with (
        listening("hash", "--hosts", "1", "--config", str(config)) as server,
        joining(server.url, "a", "--mixed", "1"),
    ):
        server.wait_ready()
        command = [sys.executable, "-m", "baton.cli.main", "host", "--join", server.url]
        twin = subprocess.run([*command, "--name", "a", "--mixed", "1"], capture_output=True, text=True, timeout=60)
        assert twin.returncode == 1
        assert re.search("given up after .* there is a host a already; give another --name", twin.stdout)
        other = subprocess.run(
            [*command, "smollm2-135m", "--name", "b", "--mixed", "1"], capture_output=True, text=True, timeout=60
        )
        assert other.returncode == 2
        assert "smollm2-135m" in other.stderr, "which one is foreign"
        assert "architecture hash and llama" in other.stderr or "architecture llama and hash" in other.stderr
        small = subprocess.run(
            [*command, "--name", "b", "--mixed", "1", "--kv-blocks", "4"], capture_output=True, text=True, timeout=60
        )
        assert small.returncode == 2
        assert "or more" in small.stderr
        alone = subprocess.run(
            [*command, "--name", "c", "--mixed", "1", "--listen", "192.0.2.1", "--join-wait-s", "0"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert alone.returncode == 2
        assert "cannot listen on 192.0.2.1" in alone.stderr
        command[-1] = f"{server.url}/v1"
        refused = subprocess.run([*command, "--name", "d"], capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2
        assert "without a path" in refused.stderr
        assert "{" not in refused.stderr, "the body is no message"


def test_a_small_host_that_leaves_before_anybody_was_served_limits_no_request() -> None:
    """4 blocks are 64 tokens; the prompt has more."""
    with listening("hash", "--hosts", "2") as server:
        with joining(server.url, "small", "--mixed", "1", "--kv-blocks", "4"):
            wait_for_hosts(server, 1)
        wait_for_hosts(server, 0)
        with joining(server.url, "a", "--prefill", "1"), joining(server.url, "b", "--decode", "1"):
            server.wait_ready()
            with server.client() as client:
                answer = client.post("/v1/completions", json={"prompt": "many words " * 20, "max_tokens": 4})
                assert answer.status_code == 200, answer.text


def test_a_host_joins_with_the_servers_key_only() -> None:
    with listening("hash", "--hosts", "1", "--api-key", "secret") as server:
        command = [sys.executable, "-m", "baton.cli.main", "host", "--join", server.url, "--name", "a"]
        refused = subprocess.run([*command, "--api-key", "guess"], capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2
        assert "--api-key" in refused.stderr
        with joining(server.url, "a", "--api-key", "secret"):
            server.wait_ready()
