"""Policies of the user's own that raise: the simulator does what the server does, and says what they raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.core.config import Topology
from baton.decide.policy.policy_sets import policy_set
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.spec import ClusterSpec

MODULE = """
from baton.decide.policy.batching import MixedChunked
from baton.decide.policy.eviction import LeastRecentlyUsed
from baton.decide.policy.fairness import FirstComeFirstServed


class Routes:
    def route(self, request, candidates, cluster, cost):
        raise RuntimeError("boom of Routes")


class Interrupted:
    def route(self, request, candidates, cluster, cost):
        raise KeyboardInterrupt


class Selects:
    def select(self, candidates, limits, cost):
        raise RuntimeError("boom of Selects")


class SelectsLate:
    steps = 0

    def select(self, candidates, limits, cost):
        SelectsLate.steps += 1
        if SelectsLate.steps == 3:
            raise RuntimeError("boom of SelectsLate")
        return MixedChunked().select(candidates, limits, cost)


class SelectsNonsense:
    def select(self, candidates, limits, cost):
        return [("nobody", 1)]


class Evicts(LeastRecentlyUsed):
    def add(self, block, facts):
        raise RuntimeError("boom of Evicts")


class Sorts(FirstComeFirstServed):
    def key(self, request):
        raise RuntimeError("boom of Sorts")
"""


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command, with a module of broken policies at hand: eight requests on one prefill and one decode worker."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_policies.py").write_text(MODULE)
    rows = [{"at_s": n / 4, "input_tokens": 40, "output_tokens": 5} for n in range(8)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "cluster.toml").write_text("worker_start_s = 1.0\n[topology]\nprefill = 1\ndecode = 1\n")
    return ["sim", "--cluster", str(tmp_path / "cluster.toml"), "--trace", str(tmp_path / "trace.jsonl")]


def own(folder: Path, family: str, name: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(f'[policy]\nname = "distserve"\n[policy.{family}]\nuse = "broken_policies:{name}"\n')
    return str(path)


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("routing", "Routes", "8: the policy Routes failed: RuntimeError: boom of Routes"),
        ("batching", "Selects", "last: prefill-0 ended: RuntimeError: boom of Selects"),
        ("batching", "SelectsNonsense", "last: prefill-0 ended: TypeError"),
        ("fairness", "Sorts", "8: the policy AdmitAll or Sorts failed: RuntimeError: boom of Sorts"),
    ],
)
def test_requests_fail_with_the_words_of_what_was_raised(
    family: str, name: str, words: str, sim: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(tmp_path / "run.log")
    assert main([*sim, "--policy", own(tmp_path, family, name), "--log", log]) == 1
    assert words in capsys.readouterr().out
    assert main(["replay", log]) == 0, "INV-7 holds of broken policies too"


def test_whoever_interrupts_a_simulation_reads_no_traceback(
    sim: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*sim, "--policy", own(tmp_path, "routing", "Interrupted")]) == 1
    assert capsys.readouterr().err == "baton: interrupted\n"


def test_a_worker_that_ended_once_is_started_again_and_its_request_goes_on(sim: list[str], tmp_path: Path) -> None:
    log, results = tmp_path / "run.log", tmp_path / "results.json"
    policy = own(tmp_path, "batching", "SelectsLate")
    assert main([*sim, "--policy", policy, "--log", str(log), "--json", str(results)]) == 0
    assert json.loads(results.read_text())["completed"] == 8
    assert b"boom of SelectsLate" in log.read_bytes()


def test_a_worker_that_ends_again_and_again_is_given_up_as_a_server_does(
    sim: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six ends within a minute; the last two requests wait for somebody until they are turned away."""
    (tmp_path / "cluster.toml").write_text("worker_start_s = 0.1\n[topology]\nmixed = 1\n")
    log = tmp_path / "run.log"
    assert main([*sim, "--policy", own(tmp_path, "batching", "Selects"), "--log", str(log)]) == 1
    assert b"given up after 6 such ends within 60 s" in log.read_bytes()
    assert log.read_bytes().count(b"boom of Selects") >= 6


def test_an_eviction_that_raises_ends_the_simulation_in_words(
    sim: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server goes on with another one; results of that would not be those of the policy that was asked for."""
    rows = [
        {"at_s": n / 4, "input_tokens": 40, "output_tokens": 5, "prefix_ids": [1, 2], "prefix_block_tokens": 16}
        for n in range(8)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*sim, "--policy", own(tmp_path, "eviction", "Evicts")]) == 2
    said = capsys.readouterr().err
    assert "the policy Evicts failed: RuntimeError: boom of Evicts" in said
    assert "a simulation would show the results of `lru`: correct the policy" in said


def test_what_our_own_policies_raise_is_a_bug_and_no_end_of_a_worker() -> None:
    spec = ClusterSpec(topology=Topology(mixed=1))
    assert not configured_policies(policy_set("baton"), spec).are_own_in_workers
