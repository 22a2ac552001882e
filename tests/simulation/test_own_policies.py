"""A policy of the user's own plays in the simulator, in a replay and live from one and the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ROOT / "examples" / "policies"
CLUSTER = ROOT / "examples" / "clusters" / "one-gpu-host.toml"


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command, on a trace in which two tenants take turns."""
    monkeypatch.syspath_prepend(str(POLICIES))
    rows = [{"at_s": n / 4, "input_tokens": 400, "output_tokens": 20, "tenant": f"t{n % 2}"} for n in range(30)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["sim", "--cluster", str(CLUSTER), "--trace", str(trace)]


def test_it_is_simulated_logged_and_replayed(
    sim: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, log = str(POLICIES / "sticky_tenant.toml"), str(tmp_path / "run.log")
    assert main([*sim, "--policy", own, "--log", log]) == 0
    assert main(["replay", log]) == 0, "the same decisions, from what the log says of the policies"
    for policy in (own, "round-robin"):
        out = tmp_path / "simulated.json"
        assert main(["replay", log, "--simulate", "--policy", policy, "--json", str(out)]) == 0
        found = json.loads(out.read_text())
        assert (found["other"] == found["as_logged"]) == (policy == own)


def test_a_policy_that_was_edited_since_is_told(
    sim: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log names it, and holds what its file was: a replay that differs has a reason then."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_since.py"
    module.write_text((POLICIES / "sticky_tenant.py").read_text())
    own, log = tmp_path / "own.toml", str(tmp_path / "run.log")
    own.write_text("[policy.routing]\nuse = 'edited_since:StickyTenant'\n")
    assert main([*sim, "--policy", str(own), "--log", log]) == 0
    assert main(["replay", log]) == 0
    assert "has changed" not in capsys.readouterr().err
    module.write_text(f"{module.read_text()}# one more line\n")
    for command in (["replay", log], ["explain", "request-3", "--log", log]):
        assert main(command) == 0
        assert "the policy edited_since:StickyTenant is not the one that decided" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[policy.routing]\nuse = 'no_such_module:X'", "no_such_module"),
        ("[policy]\nname = 'batton'", "did you mean 'baton'?"),
        ("[polcy]", "unknown key polcy"),
        ("[policy", "not a TOML file"),
        (None, "cannot read the policies"),
    ],
)
def test_a_file_that_is_none_is_told(
    text: str | None, words: str, sim: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.toml"
    if text is not None:
        path.write_text(text)
    assert main([*sim, "--policy", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_step_that_takes_no_time_fails_no_request(tmp_path: Path, sim: list[str]) -> None:
    """Published peaks without an engine's overheads: an empty step is free, and the default policy divided by it."""
    rows = [{"at_s": n / 200, "input_tokens": 400, "output_tokens": 200} for n in range(60)]
    Path(sim[4]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    cluster = tmp_path / "ideal.yaml"
    kind = "{cost: {model: roofline, llm: llama3.1-8b, hardware: H100, engine: ideal}}"
    roles = "\n".join(f"  - {{role: {role}, count: 1, kind: k}}" for role in ("prefill", "decode"))
    cluster.write_text(f"workers:\n{roles}\nkinds:\n  k: {kind}\n")
    sim[2] = str(cluster)
    assert main(sim) == 0


def test_the_queue_is_as_long_as_its_policy_was_told(sim: list[str], tmp_path: Path) -> None:
    """The cluster file's length is for policies that were told none."""
    rows = [{"at_s": 0.0, "input_tokens": 400, "output_tokens": 20} for _ in range(30)]
    Path(sim[4]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    own, results = tmp_path / "own.toml", tmp_path / "results.json"
    own.write_text('[policy.admission]\nuse = "bounded-queue"\noptions = {requests_max = 3}\n')
    assert main([*sim, "--policy", str(own), "--json", str(results)]) == 0
    assert json.loads(results.read_text())["rejected"] == 27
