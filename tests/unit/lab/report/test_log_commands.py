"""`baton explain` and `baton replay` on a log file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from baton.cli.main import main
from baton.core.messages import RequestArrived, SetRole
from baton.core.types import Slo, WorkerId
from baton.decide.control.decision_log import Decision, LogHeader
from baton.lab.report.log_records import trace_of_log
from baton.lab.workload.load import read_trace
from baton.serve.live.log_file import LogWriter
from tests.unit.lab.report.logs import BLOCK_TOKENS, COST, POLICY, log_of, request

HEADER = LogHeader(policy=POLICY, block_tokens=BLOCK_TOKENS, cost=COST)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "decisions.log"
    writer = LogWriter(path, HEADER, 1 << 20)
    for decision in log_of():
        writer.append(decision)
    writer.close()
    return path


def test_explain_shows_who_won_and_why(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "asked", "--log", str(log)]) == 0
    shown = capsys.readouterr().out
    assert "> p0" in shown
    assert "EarliestFirstToken: p0, and no worker is predicted to be earlier" in shown
    assert "d0 was lost: killed too; p1 continues it, its KV comes from near (attempt 2)" in shown


def test_explain_writes_what_it_shows_as_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "late", "--log", str(log), "--json", "-"]) == 0
    story = json.loads(capsys.readouterr().out)
    assert (story["request_id"], story["outcome"], story["slo"]["ttft_s"]) == ("late", "rejected", 0.001)
    assert story["moments"][0]["questions"][0]["options"][0]["worker"] == "p0"


def test_a_reader_that_has_seen_enough_is_no_error(log: Path) -> None:
    """As `baton explain ... | head` is; sent through a pipe that nobody reads from the start."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "baton.cli.main", "explain", "asked", "--log", str(log), "--json", "-"]
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")


def test_explain_shows_the_roles_of_a_worker_and_why_they_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, flip = tmp_path / "flips.log", SetRole(WorkerId("d0"), "mixed", "prompts are late")
    writer, decisions = LogWriter(path, HEADER, 1 << 20), log_of()
    for decision in [*decisions[:-1], structs.replace(decisions[-1], commands=(flip,))]:
        writer.append(decision)
    writer.close()
    assert main(["explain", "d0", "--log", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[-1][1:] == ["mixed", "prompts", "are", "late"]
    assert main(["explain", "d0", "--log", str(path), "--json", "-"]) == 0
    story = json.loads(capsys.readouterr().out)
    assert (story["worker"], story["roles"][-1]["reason"]) == ("d0", "prompts are late")


def test_explain_says_which_requests_there_are(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nobody", "--log", str(log)]) == 2
    assert "no request 'nobody' among its 3, the last of them busy, asked, late" in capsys.readouterr().err


def test_what_is_no_log_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no log at all")
    assert main(["explain", "x", "--log", str(path)]) == 2
    assert main(["replay", str(path)]) == 2
    assert "is no decision log" in capsys.readouterr().err


def test_replay_decides_what_the_log_says(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log)]) == 0
    assert "17 events, the same decisions" in capsys.readouterr().out


def test_a_log_that_is_cut_is_said_to_be(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is there replays alike; that is not all that the server decided."""
    log.write_bytes(log.read_bytes()[:-3])
    assert main(["replay", str(log)]) == 1
    shown = capsys.readouterr()
    assert "16 events, the same decisions" in shown.out
    assert "ends in the middle of an entry" in shown.err


def test_policies_are_asked_with_the_cost_model_of_the_log(log: Path, tmp_path: Path) -> None:
    """One that says otherwise decides otherwise: the header carries it."""
    other = tmp_path / "other.log"
    writer = LogWriter(other, structs.replace(HEADER, cost={**COST, "prefill_token_s": 0.5}), 1 << 20)
    for decision in log_of():
        writer.append(decision)
    writer.close()
    assert main(["replay", str(log)]) == 0
    assert main(["replay", str(other)]) == 1  # another reason for the refusal


def test_replay_refuses_what_it_does_not_know_all_at_once(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--simulate", "--policy", "leest-load"]) == 2
    assert "did you mean 'least-load'" in capsys.readouterr().err
    assert main(["replay", str(log), "--json", "-", "--policy", "least-load", "--seed", "1"]) == 2
    said = capsys.readouterr().err
    for flag in ("--json", "--policy", "--seed"):
        assert f"{flag} needs --simulate" in said


def test_the_arrivals_of_a_log_are_a_trace(log: Path, tmp_path: Path) -> None:
    """Lengths, prefixes and promises are kept; what did not finish is as long as the others were."""
    out = tmp_path / "arrivals.jsonl"
    assert main(["replay", str(log), "--trace-out", str(out)]) == 0
    trace = read_trace(out)
    assert trace.format == "baton"
    assert [(r.at_s, r.input_tokens, r.output_tokens) for r in trace.requests] == [
        (0, 200, 46),
        (1, 400, 46),
        (4, 400, 46),
    ]
    assert [len(request.prefix_ids) for request in trace.requests] == [0, 90, 0]
    assert trace.requests[1].prefix_block_tokens == BLOCK_TOKENS
    assert trace.requests[2].slo == Slo(ttft_s=0.001, tpot_s=1.0)


def test_the_trace_of_a_log_keeps_the_clients() -> None:
    asked = structs.replace(request("x"), client=7)
    (found,) = trace_of_log([Decision(1.0, RequestArrived(asked), ())], block_tokens=BLOCK_TOKENS).requests
    assert found.client == 7


def test_replay_draws_the_log(log: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "log.html", tmp_path / "trace.json"
    assert main(["replay", str(log), "--html", str(page), "--perfetto", str(trace)]) == 0
    assert "Workers over time" in page.read_text()
    assert json.loads(trace.read_bytes())["traceEvents"]
    assert main(["replay", str(log), "--html", str(tmp_path / "nowhere" / "log.html")]) == 2
