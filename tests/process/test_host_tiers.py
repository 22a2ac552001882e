"""Tiers of joined hosts: blocks are read again after the host was killed, and by another host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from baton.move.store.node import StoreNode
from tests.hosting import joining
from tests.serving import RunningServer, listening, serving

PROMPT = "What one host has computed, another need not compute again. " * 12
BODY = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
BLOCK_TOKENS = 16
WHOLE_TOKENS = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
MIXED = ("--mixed", "1", "--kv-blocks", "96")
ASKS_MAX = 20_000
STORED = ("baton_tier_blocks_total", 'outcome="stored"')


def complete(client: httpx.Client) -> tuple[str, int]:
    """Request a completion. Return the text and the number of cached tokens."""
    answer = client.post("/v1/completions", json=BODY).raise_for_status().json()
    return answer["choices"][0]["text"], answer["timings"]["cached_tokens"]


def wait_for_hosts(server: RunningServer, *names: str, stored_blocks: int = 0) -> dict[str, dict]:
    """Wait until exactly these hosts are ready, with so many blocks in each one's first tier. Return them by name."""

    def ready(state: dict) -> dict[str, dict]:
        return {host["id"]: host for host in state["hosts"] if host["state"] == "ready"}

    def is_stored(state: dict) -> bool:
        hosts = ready(state)
        return set(hosts) == set(names) and all(
            host["tiers"][0]["kv_blocks_cached"] >= stored_blocks for host in hosts.values()
        )

    return ready(server.wait_until(is_stored, reason=f"{names} are ready with {stored_blocks} blocks"))


def wait_for_tier(server: RunningServer, state: str) -> None:
    """Wait until the one tier of the one host is in this state."""
    server.wait_until(
        lambda cluster: [tier["state"] for host in cluster["hosts"] for tier in host["tiers"]] == [state],
        reason=f"the tier is {state}",
    )


def wait_for_more_than(stored_blocks: float, server: RunningServer) -> None:
    """Wait until more blocks than these were written."""
    server.wait_until(lambda _: server.metric(*STORED) > stored_blocks, reason="more blocks are written")


def test_a_host_finds_what_it_kept_before_it_was_killed_and_so_does_a_mover(tmp_path: Path) -> None:
    """A killed mover's unfinished commands count as failed, no block is lost in the accounts, the text is the same."""
    arguments = (*MIXED, "--tier", f"file://{tmp_path}?bytes=64e6&io=buffered")
    with listening("hash", "--hosts", "1") as server, server.client() as client:
        with joining(server.url, "a", *arguments) as host:
            server.wait_ready()
            text, cached = complete(client)
            assert cached == 0
            wait_for_hosts(server, "a", stored_blocks=len(PROMPT) // BLOCK_TOKENS)
            host.process.kill()
            host.process.wait()
        wait_for_hosts(server)
        with joining(server.url, "a", *arguments) as host:
            wait_for_hosts(server, "a", stored_blocks=len(PROMPT) // BLOCK_TOKENS)
            assert complete(client) == (text, WHOLE_TOKENS)
            (tier,) = wait_for_hosts(server, "a")["a"]["tiers"]
            assert (tier["name"], tier["loaded_blocks"]) == ("file", WHOLE_TOKENS // BLOCK_TOKENS)
            assert tier["missed_blocks"] == 0
            top = subprocess.run(
                [sys.executable, "-m", "baton.cli.main", "top", "--once", "--url", server.url],
                capture_output=True,
                text=True,
                check=True,
            )
            assert f"tier file: {tier['kv_blocks_cached']} KV blocks of" in top.stdout
            os.kill(host.mover(), signal.SIGKILL)
            before = tier["kv_blocks_cached"]
            for number in range(ASKS_MAX):  # until the next mover is there: what is asked for before is not kept
                client.post("/v1/completions", json={**BODY, "prompt": f"{number} {PROMPT}"}).raise_for_status()
                (tier,) = wait_for_hosts(server, "a")["a"]["tiers"]
                if tier["kv_blocks_cached"] > before:
                    break
            else:
                raise AssertionError(f"nothing is written after the mover's death\n{server.output()}")
            assert complete(client)[0] == text
            assert tier["missed_blocks"] == 0


def test_what_another_server_puts_into_a_shared_store_is_found(tmp_path: Path) -> None:
    """Both hosts run: the idle one lists the store's new blocks and reads them."""
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=64_000_000)
    config = tmp_path / "baton.toml"
    config.write_text(f"[[tiers]]\nurl = 'pool://{node.address}'\nlist_s = 0.1\n")
    arguments = ("hash", *MIXED, "--config", str(config))
    try:
        with serving(*arguments) as late, serving(*arguments) as early:
            with early.client() as client:
                text, cached = complete(client)
            assert cached == 0
            wait_for_hosts(late, "host-0", stored_blocks=len(PROMPT) // BLOCK_TOKENS)
            with late.client() as client:
                assert complete(client) == (text, WHOLE_TOKENS)
    finally:
        node.close()


def test_a_host_reads_what_another_has_put_into_the_store_of_all(tmp_path: Path) -> None:
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=64_000_000)
    try:
        shared = ("--tier", f"pool://{node.address}")
        with listening("hash", "--hosts", "1", *shared) as server, server.client() as client:
            with joining(server.url, "a", *MIXED):
                server.wait_ready()
                text, cached = complete(client)
                assert cached == 0
                wait_for_hosts(server, "a", stored_blocks=len(PROMPT) // BLOCK_TOKENS)
            with joining(server.url, "b", *MIXED):
                wait_for_hosts(server, "b", stored_blocks=len(PROMPT) // BLOCK_TOKENS)
                assert complete(client) == (text, WHOLE_TOKENS)
    finally:
        node.close()


def test_hosts_and_movers_that_start_while_the_store_is_down_use_it_when_it_is_up() -> None:
    """What is asked of that tier has failed, and nothing else: the text is the same, and the mover lives. When the
    store is back it is used again, with no process started anew."""
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=64_000_000)
    port = int(node.address.rpartition(":")[2])
    node.close()
    with (
        listening("hash", "--hosts", "1", "--tier", f"pool://127.0.0.1:{port}") as server,
        server.client() as client,
        joining(server.url, "a", *MIXED) as host,
    ):
        server.wait_ready()
        text, _ = complete(client)
        wait_for_tier(server, "left alone")
        node = StoreNode(host="127.0.0.1", port=port, capacity_bytes=64_000_000)
        try:
            wait_for_tier(server, "used")
            assert complete(client)[0] == text
            wait_for_hosts(server, "a", stored_blocks=len(PROMPT) // BLOCK_TOKENS)
        finally:
            node.close()
        os.kill(host.mover(), signal.SIGKILL)
        wait_for_tier(server, "left alone")
        mover = host.mover()
        for number in range(20):
            client.post("/v1/completions", json={**BODY, "prompt": f"{number} {PROMPT}"}).raise_for_status()
        assert complete(client)[0] == text
        again = StoreNode(host="127.0.0.1", port=port, capacity_bytes=64_000_000)
        try:
            wait_for_tier(server, "used")
            before = server.metric(*STORED)
            client.post("/v1/completions", json={**BODY, "prompt": f"new {PROMPT}"}).raise_for_status()
            wait_for_more_than(before, server)
            assert complete(client)[0] == text
            assert host.mover() == mover
        finally:
            again.close()
