"""Answers come as long as the trace has them; where they cannot, it is said how many were cut, and by what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.main import main

FEW, LONG = 40, 6000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = ({"timestamp": 1000 * at, "input_length": 64, "output_length": n} for at, n in enumerate((FEW, LONG, FEW)))
    path.write_text("\n".join(json.dumps({**row, "hash_ids": [1]}) for row in rows))
    return path


def simulate(trace: Path, cluster: str, *more: str) -> dict[str, float]:
    """Play it, with a quick model, and return its results."""
    described = trace.with_name("cluster.toml")
    described.write_text(f"{cluster}\n[cost]\nstep_overhead_s = 0.001\nprefill_token_s = 0.0\ndecode_request_s = 0.0")
    out = trace.with_name("r.json")
    assert main(["sim", "--cluster", str(described), "--trace", str(trace), "--json", str(out), *more]) == 0
    return json.loads(out.read_text())


def produced(results: dict[str, float]) -> int:
    return round(results["output_tokens_per_s"] * results["duration_s"])


def test_a_long_answer_comes_whole_where_the_cluster_says_nothing(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert produced(simulate(trace, "")) == LONG + 2 * FEW
    assert "answers cut" not in capsys.readouterr().out


@pytest.mark.parametrize("cells", [1, 2])
def test_answers_that_the_cluster_cuts_are_counted_and_the_key_is_named(
    cells: int, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = trace.with_name("p.html")
    flags = ("--html", str(page)) if cells == 1 else ()
    results = simulate(trace, f"output_tokens_max = 100\ncells = {cells}", *flags)
    assert produced(results) == 100 + 2 * FEW
    out = capsys.readouterr().out
    assert "1 of 3 answers end at output_tokens_max = 100 of the cluster file" in out
    assert "5900 of 6080 output tokens of the trace were not generated" in out
    assert cells > 1 or "1 of 3 answers end at output_tokens_max" in page.read_text()


def test_answers_that_no_host_can_hold_are_counted_too(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = simulate(trace, "kv = {blocks = 100, block_tokens = 16}")
    assert produced(results) == 1600 - 64 + 2 * FEW
    assert "1 of 3 answers fill the KV of a host (1600 tokens, prompt included)" in capsys.readouterr().out


def test_where_results_go_to_a_program_what_was_cut_goes_where_errors_go(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = trace.with_name("cluster.toml")
    cluster.write_text("output_tokens_max = 100")
    assert main(["sim", "--cluster", str(cluster), "--trace", str(trace), "--json", "-"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["completed"] == 3
    assert "output_tokens_max = 100" in said.err
