"""Hosts whose KV lies otherwise than it may: they are refused, or what it loses is named (else: test_hosts.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.move.store.node import StoreNode
from tests.hosting import cluster
from tests.process.test_hosts import DECODE, PREFILL, ask
from tests.serving import RunningServer


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("--block-tokens", "24"), "a multiple"), (("--block-tokens", "8"), "--block-tokens 16")],
)
def test_a_host_whose_blocks_do_not_fit_is_refused_with_both_numbers(
    arguments: tuple[str, ...], reason: str, hash_server: RunningServer
) -> None:
    command = [sys.executable, "-m", "baton.cli.main", "host", "--join", hash_server.url, *DECODE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert reason in done.stderr + done.stdout


def test_another_precision_is_refused_or_what_it_loses_is_named(
    tmp_path: Path, tiny_model: str, tiny_server: RunningServer
) -> None:
    """Eight bits at decode's host take a quarter of float32's room there; the answer says what that has cost."""
    body = {"prompt": "The three primary colours are", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    eight_bits = (*DECODE, "--kv-dtype", "int8")
    command = [sys.executable, "-m", "baton.cli.main", "host", "--join", tiny_server.url, *eight_bits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "float32" in done.stderr
    assert "int8" in done.stderr
    with tiny_server.client() as client:
        assert "kv_loss" not in ask(client, body)["timings"]
    path = tmp_path / "baton.toml"
    path.write_text("dtype = 'float32'\n[hosts]\nlossy = true\n")
    hosts = {"a": PREFILL, "b": eight_bits}
    with cluster(tiny_model, hosts, "--config", str(path)) as (server, _), server.client() as client:
        answer = ask(client, body)
    assert "from float32 to int8" in answer["timings"]["kv_loss"]
    assert answer["usage"]["completion_tokens"] == 8


def test_a_handoff_through_a_rounded_pool_names_its_loss(tmp_path: Path, tiny_model: str) -> None:
    """The wire and the pool hold 8 bits per number, but for one layer. Both hosts compute in float32."""
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=64_000_000)
    path = tmp_path / "baton.toml"
    tier = f"[[tiers]]\nurl = 'pool://{node.address}?via=tcp'\nformat = 'int8'\nexact_layers = 1\n"
    path.write_text(f"dtype = 'float32'\n{tier}[policy.handoff]\nuse = 'pool-handoff'\n")
    body = {"prompt": "The three primary colours are " * 6, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    hosts = {"a": PREFILL, "b": DECODE}
    try:
        with cluster(tiny_model, hosts, "--config", str(path)) as (server, _), server.client() as client:
            answer = ask(client, body)
    finally:
        node.close()
    assert "from float32 to int8: each number was rounded" in answer["timings"]["kv_loss"]
    assert "1 of 3 layers were spared" in answer["timings"]["kv_loss"]
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["timings"]["decode_worker"] == "b.decode-0"
