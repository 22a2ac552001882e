"""`baton replay LOG --simulate`: the arrivals of a log under other policies, beside what came of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.core.errors import ConfigError
from baton.core.messages import CloseRequest, PrefillFinished, RequestArrived, RequestFinished, WorkerJoined
from baton.core.ticking import WaitedTooLong
from baton.core.types import HostId, RequestId, StepShape, WorkerId, WorkerView
from baton.decide.control.decision_log import Decision, LogHeader
from baton.decide.cost.load import load_cost
from baton.decide.kv.window import PromptRules
from baton.lab.report.log_records import run_of_log
from baton.lab.sim.log_cluster import cluster_of_log
from baton.lab.sim.spec import ClusterSpec
from baton.serve.live.log_file import LogWriter
from tests.unit.lab.report.logs import BLOCK_TOKENS, COST, NEAR, P0, POLICY, log_of, request, said

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "clusters" / "one-gpu-host.toml"
LOAD = """
requests = 60
arrivals = {kind = "poisson", rate_rps = 12}
input_tokens = {kind = "uniform", low = 100, high = 3000}
output_tokens = {kind = "uniform", low = 2, high = 60}
"""
CLOSED = CloseRequest(RequestId("x"), "finished")
HEADER = LogHeader(policy=POLICY, block_tokens=BLOCK_TOKENS, cost=COST)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    load, path = tmp_path / "load.toml", tmp_path / "decisions.log"
    load.write_text(LOAD)
    simulate = ["sim", "--cluster", str(CLUSTER), "--trace", str(load), "--log", str(path), "--seed", "3"]
    assert main([*simulate, "--ttft-slo-s", "5", "--tpot-slo-s", "1"]) == 0
    return path


def _simulate(log: Path, out: Path, *more: str) -> dict:
    assert main(["replay", str(log), "--simulate", "--json", str(out), *more]) == 0
    return json.loads(out.read_text())


def test_a_log_of_the_simulator_is_simulated_as_it_was(log: Path, tmp_path: Path) -> None:
    """Same arrivals, cluster, policies and seed: what the log tells of TTFT, TPOT and E2E comes out again."""
    found = _simulate(log, tmp_path / "found.json", "--seed", "3")
    assert found["log"]["completed"] == 60
    assert found["other"] is None
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert found["log"][name] == pytest.approx(found["as_logged"][name], rel=1e-9)
    for name in ("requests", "completed", "rejected", "attainment_ratio"):
        assert found["log"][name] == found["as_logged"][name]


def test_a_simulation_that_is_as_it_was_is_not_warned_of(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _simulate(log, tmp_path / "found.json", "--seed", "3")
    assert [means["off_ratio"] for means in found["baseline"].values()] == pytest.approx([0.0, 0.0], abs=1e-9)
    for error in found["baseline"].values():
        assert error["quantiles_off_ratio"] == pytest.approx({"p50": 0.0, "p90": 0.0, "p99": 0.0}, abs=1e-9)
    assert found["warnings"] == []
    assert main(["replay", str(log), "--simulate", "--seed", "3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("error of the simulation, mean TTFT: ")
    mean_ms = found["log"]["tpot_s"]["mean"] * 1000
    assert f"mean TPOT: {mean_ms:,.4g} ms in the log, {mean_ms:,.4g} ms simulated (" in shown


def test_a_simulation_that_is_far_from_what_was_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server took 10 s for its first token and 10 s for each other; its cost model says a tenth of that."""
    decisions = [
        Decision(1.0, RequestArrived(request("x")), ()),
        Decision(11.0, said(P0, PrefillFinished(RequestId("x"), 1, P0, 400)), ()),
        Decision(51.0, said(P0, RequestFinished(RequestId("x"), 1, P0, "stop", 5)), (CLOSED,)),
    ]
    found = _simulated(tmp_path / "live.log", decisions, tmp_path / "found.json")
    for name, means in found["baseline"].items():
        assert means["log_s"] == found["log"][f"{name}_s"]["mean"] == 10.0
        assert means["off_ratio"] == pytest.approx(means["simulated_s"] / 10.0 - 1.0)
        assert means["off_ratio"] < -0.25
    assert "differs from the log's TTFT and TPOT by more than 25%" in " ".join(found["warnings"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "warning: a simulation with the log's own policies" in shown


def test_who_found_no_worker_was_refused_by_no_policy(tmp_path: Path) -> None:
    gone = CloseRequest(RequestId("y"), "rejected", "no worker has been there", "no_worker")
    decisions = [
        *ended_where_it_began(1),
        Decision(4.0, RequestArrived(request("y")), ()),
        Decision(9.0, WaitedTooLong(5.0), (gone,)),
    ]
    found = _simulated(tmp_path / "live.log", decisions, tmp_path / "found.json")
    assert (found["log"]["rejected"], found["log"]["no_worker"]) == (0, 1)
    assert (found["as_logged"]["completed"], found["as_logged"]["no_worker"]) == (2, 0)
    assert "1 requests of the log were rejected because there was no worker" in " ".join(found["notes"])


def test_another_policy_and_another_cluster_have_a_column(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.toml"
    small.write_text(CLUSTER.read_text().replace("decode = 2", "decode = 1").replace("prefill = 2", "prefill = 1"))
    other = _simulate(log, tmp_path / "other.json", "--policy", "random", "--cluster", str(small))
    assert other["other"]["ttft_s"]["mean"] > other["as_logged"]["ttft_s"]["mean"]
    assert main(["replay", str(log), "--simulate", "--policy", "random"]) == 0
    shown = capsys.readouterr().out
    assert "simulated, random" in shown
    assert "goodput, requests/s" in shown


def test_the_cluster_of_a_live_log_is_the_fleet_that_it_was_started_with() -> None:
    """One host's arena and steps are not another's, and who came after the first request is not there yet."""

    def joined(name: str, host: str, role: str, kv_tokens: int) -> Decision:
        view = WorkerView(
            id=WorkerId(name), host=HostId(host), role=role,  # type: ignore[arg-type]
            kv_tokens_max=kv_tokens, step_tokens_max=256, requests_max=8,
        )  # fmt: skip
        return Decision(1.0, WorkerJoined(view), ())

    decisions = [
        joined("a/prefill-0", "a", "prefill", 400),
        joined("b/decode-0", "b", "decode", 800),
        Decision(2.0, RequestArrived(request("x")), ()),
        joined("b/decode-1", "b", "decode", 800),
        joined("a/prefill-0", "a", "mixed", 400),
    ]
    spec = cluster_of_log(HEADER, decisions)
    assert [(view.role, view.host) for view in spec.views()] == [("prefill", "a"), ("decode", "b")]
    assert [spec.kv_of(HostId(host)).blocks for host in "ab"] == [100, 200]
    assert [spec.batch_of(view.kind).requests_max for view in spec.views()] == [8, 8]
    assert spec.cost_model().step_s(StepShape()) == COST["step_overhead_s"]
    with pytest.raises(ConfigError, match="no worker ever joined"):
        cluster_of_log(HEADER, decisions[2:3])


@pytest.mark.parametrize("kv_tokens", [400, 0])
def test_the_cluster_of_a_live_log_has_its_kinds_and_its_rules_of_memory(kv_tokens: int) -> None:
    """Before, all workers had the cost of the first kind, and blocks were granted and restored as by default."""
    cost = {"kinds": {"slow": {"step_overhead_s": 0.5}, "fast": {"step_overhead_s": 0.1}}}
    rules = PromptRules(growth_tokens=2**20, preemption="recompute")
    header = LogHeader(policy=POLICY, block_tokens=BLOCK_TOKENS, cost=cost, prompts=rules)
    views = [
        WorkerView(id=WorkerId(kind), host=NEAR, role="mixed", kind=kind, kv_tokens_max=kv_tokens)
        for kind in ("fast", "slow", "of no kind")
    ]
    spec = cluster_of_log(header, [Decision(1.0, WorkerJoined(view), ()) for view in views])
    costs = [spec.cost_model().on(view.kind).step_s(StepShape()) for view in spec.views()]
    logged = load_cost(cost, folder=ROOT).cost
    assert costs == [logged.on(view.kind).step_s(StepShape()) for view in views] == [0.1, 0.5, 0.5]
    assert spec.kv_of(NEAR).blocks == (kv_tokens // BLOCK_TOKENS or ClusterSpec().kv.blocks)
    assert (spec.prompt_rules.growth_tokens, spec.prompt_rules.preemption) == (2**20, "recompute")
    assert {spec.batch_of(view.kind).growth_tokens for view in spec.views()} == {2**20}


def test_what_a_log_cannot_know_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal has no length; and a log that does not tell of a first token has no time of it."""
    path = tmp_path / "live.log"
    writer = LogWriter(path, HEADER, 1 << 20)
    for decision in log_of():
        writer.append(decision)
    writer.close()
    found = _simulate(path, tmp_path / "found.json")
    assert (found["log"]["requests"], found["log"]["completed"], found["log"]["rejected"]) == (2, 1, 1)
    assert found["as_logged"]["requests"] == 3
    assert found["log"]["ttft_s"]["mean"] == 0.75
    assert "2 requests of the log have no known length" in " ".join(found["notes"])
    both = run_of_log(ended_where_it_began(5))
    assert (both.untimed, both.records[0].ttft_s, both.open) == (1, None, 0)


def ended_where_it_began(output_tokens: int) -> list[Decision]:
    return [
        Decision(1.0, RequestArrived(request("x")), ()),
        Decision(3.0, said(P0, RequestFinished(RequestId("x"), 1, P0, "stop", output_tokens)), (CLOSED,)),
    ]


def _simulated(path: Path, decisions: list[Decision], out: Path) -> dict:
    writer = LogWriter(path, HEADER, 1 << 20)
    view = WorkerView(id=P0, host=NEAR, role="mixed", kv_tokens_max=4000)
    for decision in [Decision(0.5, WorkerJoined(view), ()), *decisions]:
        writer.append(decision)
    writer.close()
    return _simulate(path, out, "--ttft-slo-s", "5")


@pytest.mark.parametrize(("output_tokens", "is_known"), [(1, True), (5, False)])
def test_an_answer_of_one_token_hides_nothing(output_tokens: int, is_known: bool, tmp_path: Path) -> None:
    """The only token came when the request ended; of several that nothing is told of, only the last did."""
    found = _simulated(tmp_path / "live.log", ended_where_it_began(output_tokens), tmp_path / "found.json")
    assert found["log"]["ttft_s"]["mean"] == (2.0 if is_known else None)
    assert (found["log"]["attainment_ratio"] is not None) == is_known
    assert (found["log"]["goodput_rps"] is not None) == is_known
    assert ("1 requests with more than one token" in " ".join(found["notes"])) != is_known


def test_a_share_in_slo_needs_a_promise(tmp_path: Path) -> None:
    path = tmp_path / "live.log"
    promised = _simulated(path, ended_where_it_began(1), tmp_path / "promised.json")
    without = _simulate(path, tmp_path / "without.json")
    is_noted = ["no request has an SLO" in " ".join(found["notes"]) for found in (promised, without)]
    assert (is_noted, promised["log"]["attainment_ratio"], without["log"]["attainment_ratio"]) == (
        [False, True],
        1.0,
        None,
    )


def test_the_first_token_is_the_first_attempts() -> None:
    """After a death the prompt may be computed again: the client has had its first token by then."""
    run = run_of_log(
        [
            Decision(1.0, RequestArrived(request("x")), ()),
            Decision(2.0, said(P0, PrefillFinished(RequestId("x"), 1, P0, 400)), ()),
            Decision(5.0, said(P0, PrefillFinished(RequestId("x"), 2, P0, 401)), ()),
            Decision(6.0, said(P0, RequestFinished(RequestId("x"), 2, P0, "stop", 5)), (CLOSED,)),
        ]
    )
    [record] = run.records
    assert (record.ttft_s, record.tpot_s, record.e2e_s) == (1.0, 1.0, 5.0)


def test_flags_that_need_the_simulation_say_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log), "--cluster", "x.toml", "--seed", "1", "--ttft-slo-s", "-1"]) == 2
    shown = capsys.readouterr().err
    for words in ("--cluster needs --simulate", "--seed needs --simulate", "--ttft-slo-s is -1"):
        assert words in shown
    assert main(["replay", str(log), "--simulate", "--cluster", "nowhere.toml"]) == 2
    assert "nowhere.toml: cannot read the cluster" in capsys.readouterr().err
    assert main(["replay", str(log), "--simulate", "--policy", "leest-load"]) == 2
    assert "did you mean 'least-load'" in capsys.readouterr().err


def test_a_log_without_requests_has_nothing_to_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quiet.log"
    writer = LogWriter(path, HEADER, 1 << 20)
    writer.append(Decision(1.0, WorkerJoined(WorkerView(id=P0, host=NEAR, role="mixed")), ()))
    writer.close()
    assert main(["replay", str(path), "--simulate"]) == 2
    assert "no request arrived in this log" in capsys.readouterr().err
