"""What `baton plan` says where nothing can be built, or nothing is fast enough: a reason, and what would do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from baton.cli.main import main

ASKED = ["plan", "--objective", "goodput-per-gpu", "--finalists", "0", "--input-tokens", "1000",
         "--output-tokens", "100", "--ttft-slo-s", "1", "--tpot-slo-s", "0.05"]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--hardware", "A100=8", "--weights", "fp8"],
            "A100-80G-SXM does not compute in fp8: try weights bf16 or",
        ),
        (["--hardware", "H100=16", "--tp", "16"], "a node of H100-80G-SXM has 8: try --tp 8 --cp 1"),
        (["--hardware", "H100=1", "--tp", "2"], "but there are 1 of H100-80G-SXM: try --tp 1"),
    ],
)
def test_a_worker_that_cannot_be_had_has_a_reason(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, "--llm", "llama3.1-8b", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("ttft_s", "tpot_s"), [(0.01, 0.0001), (0.001, 0.05)])
def test_the_nearest_that_works_works_and_is_near(
    ttft_s: float, tpot_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the fastest option's own times, however far the asked ones are from them."""
    asked = ["plan", "--objective", "goodput-per-gpu", "--finalists", "0", "--llm", "llama3.1-70b", "--hardware",
             "H100=8", "--tp", "8", "--input-tokens", "8000", "--output-tokens", "250"]  # fmt: skip
    assert main([*asked, "--ttft-slo-s", str(ttft_s), "--tpot-slo-s", str(tpot_s)]) == 2
    errors = capsys.readouterr().err
    fastest = re.search(r"takes ([0-9.]+) s for a prompt", errors)
    nearest = re.search(r"nearest that works: --ttft-slo-s ([0-9.]+) --tpot-slo-s ([0-9.]+)", errors)
    assert fastest, errors
    assert nearest, errors
    assert float(nearest[1]) < 1.5 * float(fastest[1])
    assert main([*asked, "--ttft-slo-s", nearest[1], "--tpot-slo-s", nearest[2]]) == 0


def test_what_cannot_be_built_is_in_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    flags = ["--llm", "llama3.1-8b", "--tp", "1", "--hardware", "A100=1", "--weights", "bf16,fp8", "--json", str(out)]
    assert main([*ASKED, *flags]) == 0
    assert "Cannot be built" in capsys.readouterr().out
    assert any("does not compute in fp8" in line for line in json.loads(out.read_text())["out"])


def test_paths_of_flags_are_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "questions").mkdir()
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "t.jsonl").write_text(
        '{"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [1]}\n'
        '{"timestamp": 900, "input_length": 100, "output_length": 10, "hash_ids": [2]}\n'
    )
    (tmp_path / "questions" / "q.toml").write_text(
        'llm = "llama3.1-8b"\nhardware = [{name = "H100", gpus = 1}]\ntp = [1]\nfinalists = 0\n'
        "[slo]\nttft_s = 1\ntpot_s = 0.05\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "questions/q.toml", "--trace", "traces/t.jsonl"]) == 0, capsys.readouterr().err
    assert main(["plan", "questions/q.toml", "--trace", "traces/t.jsonl", "--output-tokens", "20"]) == 2
    assert "leave out workload.input_tokens and workload.output_tokens" in capsys.readouterr().err


def test_what_was_borrowed_for_a_gpu_of_ones_own_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a GPU that is neither known nor described says how to describe it."""
    asked = [*ASKED, "--llm", "llama3.1-8b", "--tp", "1"]
    path = tmp_path / "own.toml"
    path.write_text(
        '[[hardware]]\nname = "MI300X"\ngpus = 1\nbf16_flops = 1307e12\nmemory_bytes = 192e9\n'
        "memory_bytes_per_s = 5.3e12\n"
    )
    assert main([asked[0], str(path), *asked[1:]]) == 0
    said = capsys.readouterr().out
    assert "Borrowed, not measured" in said
    assert "gpu_w, gpus_per_node, inter_node_bytes_per_s" in said
    assert main([*asked, "--hardware", "MI300X=1"]) == 2
    assert "or describe it" in capsys.readouterr().err


def test_a_workload_that_the_model_cannot_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--llm", "opt-13b", "--hardware", "A100=4", "--input-tokens", "30000"]
    assert main(asked) == 2
    assert "opt-13b reads 2048 tokens of context, and the workload has prompts of 30000" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_told_before_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--llm", "nobody-has-it", "--hardware", "H100=1", "--json", "/nowhere/x", "--html", "/nowhere/y"]
    assert main(asked) == 2
    errors = capsys.readouterr().err
    assert "--json /nowhere/x: /nowhere must be a folder" in errors
    assert "--html /nowhere/y" in errors
    assert "nobody-has-it" not in errors


def test_weights_alone_are_stored_in_four_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--llm", "llama3.1-8b", "--hardware", "H100=1", "--kv", "int4"]) == 2
    assert "kv[0] is " in capsys.readouterr().err
