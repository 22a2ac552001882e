"""A file tier below the arena of a real server: what one run has written serves the next, and damage is a miss."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path

from baton.move.store.node import StoreNode
from tests.serving import RunningServer, serving

PROMPT = "What one run has computed, another need not compute again. " * 12
BLOCK_TOKENS = 16
BLOCKS = len(PROMPT) // BLOCK_TOKENS
PAGE_BYTES = 4096


def tier_blocks(server: RunningServer, outcome: str) -> float:
    return server.metric("baton_tier_blocks_total", f'outcome="{outcome}"')


def complete(server: RunningServer, prompt: str = PROMPT) -> tuple[str, int]:
    """Request a completion. Return the text and the number of cached tokens."""
    with server.client() as client:
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()
    return answer["choices"][0]["text"], answer["timings"]["cached_tokens"]


def wait_stored(server: RunningServer, blocks: int) -> None:
    server.wait_until(lambda _: tier_blocks(server, "stored") >= blocks, reason=f"{blocks} blocks are stored")


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


class SlowLink:
    """A link to a store: whatever comes back takes its time."""

    def __init__(self, far: str, delay_s: float) -> None:
        self._delay_s = delay_s
        self._over = threading.Event()
        self._far = ("127.0.0.1", int(far.rpartition(":")[2]))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listening.getsockname())
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with self._listening:
            while True:
                near, _ = self._listening.accept()
                if self._over.is_set():  # `close` knocked
                    near.close()
                    return
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        # A server that is killed or a store that is gone ends the connection: its other side sees that.
        with near, contextlib.suppress(OSError), socket.create_connection(self._far) as far:
            back = threading.Thread(target=self._pass, args=(far, near, self._delay_s), daemon=True)
            back.start()
            self._pass(near, far, 0.0)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self._over.wait(delay_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._over.set()
        socket.create_connection(self._listening.getsockname()).close()
        self._thread.join()


def test_a_store_that_is_slower_than_computing_is_read_once_and_no_more(tmp_path: Path) -> None:
    """It is given as fast. One read shows that it is not: the next prompts of which it has everything are computed."""
    config = tmp_path / "baton.toml"
    config.write_text("[cost]\nstep_overhead_s = 0.001\nprefill_token_s = 1e-5\nprefill_pair_s = 0.0\n")
    common = ("hash", "--mixed", "1", "--kv-blocks", "64", "--config", str(config))
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=64_000_000)
    link = SlowLink(node.address, 0.1)
    try:
        with serving(*common, "--tier", f"pool://{node.address}") as server:
            text, _ = complete(server)
            wait_stored(server, BLOCKS)
        with serving(*common, "--tier", f"pool://{link.address}") as server:
            assert complete(server) == (text, (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
            loaded = tier_blocks(server, "loaded")
            assert loaded == (len(PROMPT) - 1) // BLOCK_TOKENS
            complete(server, "Another one takes its place in the arena. " * 20)
            assert complete(server)[0] == text
            assert tier_blocks(server, "loaded") == loaded
    finally:
        link.close()
        node.close()


def test_a_rounded_tier_takes_less_room_and_tells_what_it_has_cost(tmp_path: Path, tiny_model: str) -> None:
    """The KV that the next run reads has 8 bits, but for one layer."""
    path = tmp_path / "baton.toml"
    url = f"file://{tmp_path}/kv?bytes=64e6&io=buffered"
    tier = f"[[tiers]]\nurl = '{url}'\nformat = 'int8'\nexact_layers = 1\n"
    path.write_text(f"dtype = 'float32'\n{tier}[cost]\nprefill_token_s = 0.01\n")  # so that a read pays
    arguments = (tiny_model, "--mixed", "1", "--kv-blocks", "96", "--config", str(path))
    body = {"prompt": PROMPT[:600], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    with serving(*arguments) as server, server.client() as client:
        timings = client.post("/v1/completions", json=body).json()["timings"]
        assert "kv_loss" not in timings
        wait_stored(server, 4)
    with serving(*arguments) as server, server.client() as client:
        timings = client.post("/v1/completions", json=body).json()["timings"]
    assert timings["cached_tokens"] >= 4 * BLOCK_TOKENS
    assert "from float32 to int8" in timings["kv_loss"]
    assert "1 of " in timings["kv_loss"]
