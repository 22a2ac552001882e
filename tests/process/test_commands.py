"""The command line: what it refuses, and how it says so."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import baton
from tests.serving import RunningServer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prefill", "1"), ("no worker can decode", "--decode")),
        (("--decode", "2"), ("no worker can prefill", "--prefill")),
        (("--prefill", "0", "--decode", "0"), ("all 0", "at least one")),
        (("--prefill", "-1", "--decode", "1"), ("topology.prefill is -1",)),
        (("--port", "70000", "--threads", "-3"), ("http.port is 70000", "threads is -3")),
        (("--dtype", "int3"), ("int3", "float32")),
        (("--prot", "3", "--frobnicate"), ("did you mean --port?", "--frobnicate; see `baton serve --help`")),
        (
            ("--gpu-memory-utilization=0.9", "-ngl", "99", "--enable-prefix-caching"),
            ("--kv-blocks N", "--device cuda", "--enable-prefix-caching; leave it out: Baton always does so"),
        ),
        (("--max-model-len", "32q"), ("'32q' is no number of tokens", "4k")),
        (("--model", "other"), ("MODEL is hash and --model is other",)),
        (("--max-num-seqs", "0", "--block-size", "-1"), ("batch.requests_max is 0", "kv.block_tokens is -1")),
        (("--context-tokens", "999999"), ("999999", "4096")),
        (("--config", "no-such-file.toml"), ("no-such-file.toml",)),
    ],
)
def test_bad_arguments_are_refused_with_all_their_problems(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = baton("serve", "hash", *arguments)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("model", ["no-such-model", "no/such-model-anywhere", "weights.bin", "weights.pth"])
def test_a_model_that_cannot_be_served_is_refused_with_what_to_do(model: str, tmp_path: Path) -> None:
    if model.endswith((".bin", ".pth")):
        path = tmp_path / model
        path.write_bytes(b"\x80\x04would be a pickle")
        model = str(path)
    done = baton("serve", model, "--port", "0")
    assert done.returncode == 2
    assert Path(model).name.split(".")[0] in done.stderr
    assert "Traceback" not in done.stderr
    if model.endswith((".bin", ".pth")):
        assert "safe_serialization" in done.stderr


def test_unknown_keys_of_a_file_are_refused_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text("modle = 'hash'\n[kv]\nblock_token = 8\n[http]\nport = 0\n")
    done = baton("serve", "--config", str(path))
    assert done.returncode == 2
    assert f"{path}: unknown key modle (did you mean 'model'?)" in done.stderr
    assert f"{path}: unknown key kv.block_token (did you mean 'block_tokens'?)" in done.stderr


def test_a_taken_port_is_told_at_once() -> None:
    """In a separate process: the exit code and the error are those that a shell sees."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "baton.cli.main", "serve", "hash", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "--port" in done.stderr


def test_top_shows_workers_and_blocks(hash_server: RunningServer) -> None:
    done = baton("top", "--url", hash_server.url, "--once")
    assert done.returncode == 0
    assert "prefill-0" in done.stdout
    assert "KV blocks used" in done.stdout
    assert baton("top", "--url", "http://127.0.0.1:1", "--once").returncode == 1
    assert baton("top", "--url", "ftp://x", "--once").returncode == 2


def test_a_policy_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text("[policy.routing]\nuse = 'baton.decide.policy.routing:EarliestFirstTokn'\n")
    done = baton("serve", "hash", "--config", str(path))
    assert done.returncode == 2
    assert "'earliest-first-token'" in done.stderr
