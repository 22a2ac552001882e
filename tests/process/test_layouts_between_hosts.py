"""Hosts whose KV lies otherwise: it is converted on its way, and the text is the same; or they are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosting import cluster
from tests.process.test_hosts import DECODE, PREFILL, PROMPT, ask, mixed_text, nothing_used, text_of, wait_until
from tests.serving import listening

__all__ = ["mixed_text"]

FORMS = {
    "larger blocks decode": (PREFILL, (*DECODE, "--block-tokens", "64")),
    "larger blocks prefill": ((*PREFILL, "--block-tokens", "32"), DECODE),
    "ranks prefill": ((*PREFILL, "--tp", "2"), DECODE),
    "ranks decode, in larger blocks": (PREFILL, (*DECODE, "--tp", "2", "--block-tokens", "48")),
}


@pytest.mark.parametrize("form", FORMS)
def test_kv_is_converted_on_its_way(form: str, mixed_text) -> None:
    """INV-8. Asked twice: the second time, prefill's host has a prefix hit, and decode's holds blocks already."""
    prefill, decode = FORMS[form]
    with cluster("hash", {"a": prefill, "b": decode}) as (server, _), server.client() as client:
        for _ in range(2):
            answer = ask(client, PROMPT)
            assert text_of(answer) == mixed_text(PROMPT)
            assert answer["timings"]["decode_worker"] == "b.decode-0"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        wait_until(server, nothing_used, what="no block is used")


def test_stages_prefill_a_real_model_and_one_process_decodes_it() -> None:
    """Two pipeline stages on the torch engine hand over to the native engine, and the other way round."""
    body = {"prompt": "The three primary colours are", "max_tokens": 24, "temperature": 0}
    stages = ("--pp", "2")
    with cluster("smollm2-135m", {"a": (*PREFILL, *stages), "b": DECODE}) as (server, _), server.client() as client:
        one = text_of(ask(client, body))
    with cluster("smollm2-135m", {"a": PREFILL, "b": (*DECODE, *stages)}) as (server, _), server.client() as client:
        other = text_of(ask(client, body))
    with listening("smollm2-135m", "--mixed", "1") as server:
        server.wait_ready()
        with server.client() as client:
            alone = text_of(ask(client, body))
    assert one == other == alone


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("--block-tokens", "24"), "a multiple"), (("--block-tokens", "8"), "--block-tokens 16")],
)
def test_a_host_whose_blocks_do_not_fit_is_refused_with_both_numbers(arguments: tuple[str, ...], reason: str) -> None:
    with listening("hash") as server:
        server.wait_ready()
        command = [sys.executable, "-m", "baton.cli.main", "host", "--join", server.url, *DECODE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert reason in done.stderr + done.stdout


def test_another_precision_is_refused_or_what_it_loses_is_named(tmp_path: Path) -> None:
    """Eight bits at decode's host take a quarter of float32's room there; the answer says what that has cost."""
    body = {"prompt": "The three primary colours are", "max_tokens": 8, "temperature": 0}
    eight_bits = (*DECODE, "--kv-dtype", "int8")
    with listening("smollm2-135m", "--dtype", "float32", "--mixed", "1") as server:
        server.wait_ready()
        command = [sys.executable, "-m", "baton.cli.main", "host", "--join", server.url, *eight_bits]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert "float32" in done.stderr
        assert "int8" in done.stderr
        with server.client() as client:
            assert "kv_loss" not in ask(client, body)["timings"]
    path = tmp_path / "baton.toml"
    path.write_text("dtype = 'float32'\n[hosts]\nlossy = true\n")
    hosts = {"a": PREFILL, "b": eight_bits}
    with cluster("smollm2-135m", hosts, "--config", str(path)) as (server, _), server.client() as client:
        answer = ask(client, body)
    assert "from float32 to int8" in answer["timings"]["kv_loss"]
    assert answer["usage"]["completion_tokens"] == 8
