"""Handoffs by a pool on real hosts: a store in the middle, movers that put and take, and no store at all."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.core.types import BlockHash
from baton.move.store import node_wire as wire
from baton.move.store.node import StoreNode
from baton.serve.live.log_file import read_log
from tests.hosting import RunningHost, cluster
from tests.process.test_host_tiers import BLOCK_TOKENS, BODY, WHOLE_TOKENS, wait_for_hosts
from tests.serving import RunningServer

HANDED = {**BODY, "max_tokens": 30}
END_BLOCKS = 12
"""More than one run: of a prompt of 46 blocks eight are written at once."""


class HeldNode(StoreNode):
    """Answers no write of the end of a prompt before somebody has read of its beginning, over TCP: who is lent the
    memory asks nothing to read it."""

    ANSWER_S = 4.0
    """Less than a host waits for a store."""

    def __init__(self) -> None:
        super().__init__(host="127.0.0.1", port=0, capacity_bytes=64_000_000)
        self.put_hashes: set[BlockHash] = set()
        self.was_read = threading.Event()
        self.was_read_first = True

    def _answer(self, connection: socket.socket, verb: bytes, hashes: list[BlockHash]) -> None:
        if verb == wire.PUT:
            self.put_hashes.update(hashes)
            if len(self.put_hashes) > WHOLE_TOKENS // BLOCK_TOKENS - END_BLOCKS:
                self.was_read_first &= self.was_read.wait(self.ANSWER_S)
        elif verb == wire.GET:
            self.was_read.set()
        super()._answer(connection, verb, hashes)


def plain_node() -> StoreNode:
    return StoreNode(host="127.0.0.1", port=0, capacity_bytes=64_000_000)


@contextmanager
def by_pool(
    tmp_path: Path,
    *args: str,
    open_node: Callable[[], StoreNode] = plain_node,
    options: str = "",
    own_tiers: bool = False,
) -> Iterator[tuple[RunningServer, StoreNode, dict[str, RunningHost]]]:
    """Two hosts, one that prefills and one that decodes, and a pool by which every handoff goes."""
    node = open_node()
    config = tmp_path / "baton.toml"
    pool = f"[[tiers]]\nurl = 'pool://{node.address}{options}'\n"
    config.write_text(f"{pool}[policy.handoff]\nuse = 'pool-handoff'\n")
    try:
        hosts = {"a": ("--prefill", "1"), "b": ("--decode", "1")}
        if own_tiers:
            hosts = {
                name: (*flags, "--tier", f"file://{tmp_path / name}?bytes=64e6&io=buffered")
                for name, flags in hosts.items()
            }
        with cluster("hash", hosts, "--config", str(config), *args) as (server, running):
            yield server, node, running
    finally:
        with suppress(OSError):  # a test may have closed it
            node.close()


def test_decode_takes_from_the_pool_and_directly_where_the_pool_is_gone(
    tmp_path: Path, hash_server: RunningServer
) -> None:
    """INV-8 over a real store: no byte goes from mover to mover before the store is gone. The text is that of one
    worker."""
    gone = {**HANDED, "prompt": f"Without a pool. {HANDED['prompt']}"}
    expected, expected_gone = (_text(hash_server, body) for body in (HANDED, gone))
    with by_pool(tmp_path) as (server, node, _), server.client() as client:
        answer = client.post("/v1/completions", json=HANDED).raise_for_status().json()
        assert answer["choices"][0]["text"] == expected
        timings = answer["timings"]
        assert (timings["prefill_worker"], timings["decode_worker"]) == ("a.prefill-0", "b.decode-0")
        assert timings["handoff_s"] > 0
        (tier,) = wait_for_hosts(server, "a", "b")["b"]["tiers"]
        assert tier["loaded_blocks"] >= WHOLE_TOKENS // BLOCK_TOKENS
        assert server.metric("baton_handoff_bytes_total") == 0
        node.close()
        assert _text(server, gone) == expected_gone
        assert server.metric("baton_handoff_bytes_total") > 0


def _text(server: RunningServer, body: dict) -> str:
    with server.client() as client:
        return client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]


def test_every_decision_is_replayed(tmp_path: Path) -> None:
    """INV-7, live: two hosts with a tier each, a pool of both, and a host that is killed under a request."""
    log = tmp_path / "decisions.log"
    with by_pool(tmp_path, "--log", str(log), own_tiers=True) as (server, _, running), server.client() as client:
        for first in ("one", "two"):
            body = {**HANDED, "prompt": f"{first} {HANDED['prompt']}"}
            client.post("/v1/completions", json=body).raise_for_status()
        running["b"].process.kill()
        client.post("/v1/completions", json=HANDED).raise_for_status()
    commands = {type(command).__name__ for decision in read_log(log)[1] for command in decision.commands}
    assert {"ToPool", "StoreBlocks", "LoadBlocks", "PathChosen", "BeginRequest", "ToWorker"} <= commands
    command = [sys.executable, "-m", "baton.cli.main", "replay", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "the same decisions" in done.stdout


def test_decode_takes_while_prefill_still_puts_and_outlives_the_host_that_has_put(
    tmp_path: Path, hash_server: RunningServer
) -> None:
    """The end of the prompt is not put before decode's host has read of its beginning, and nothing goes directly.

    Then prefill's host is killed while decode, which has taken all from the pool, goes on.
    """
    body = {**HANDED, "prompt": f"Another one. {HANDED['prompt']}", "max_tokens": 2000}
    expected, expected_text = (_text(hash_server, each) for each in (HANDED, body))
    with by_pool(tmp_path, open_node=HeldNode, options="?via=tcp") as (server, node, hosts), server.client() as client:
        assert _text(server, HANDED) == expected
        assert isinstance(node, HeldNode)
        assert len(node.put_hashes) >= WHOLE_TOKENS // BLOCK_TOKENS
        assert node.was_read_first
        assert server.metric("baton_handoff_bytes_total") == 0
        text, attempts = "", 0
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for number, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
                if number == 5:
                    hosts["a"].process.kill()
                chunk = json.loads(line[6:])
                text += chunk["choices"][0]["text"] if chunk["choices"] else ""
                attempts = (chunk.get("timings") or {}).get("attempts", attempts)
        assert (text, attempts) == (expected_text, 1)
