"""What a simulated run leaves: a page, a trace for Perfetto, and a log that replays and explains."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from baton.cli.logs import spec_of
from baton.cli.main import main
from baton.core.messages import CloseRequest, RequestArrived
from baton.decide.control.decision_log import Decision, SimHeader
from baton.decide.cost.fitted import FittedCost, save_fitted
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import load_spec, read_spec
from baton.lab.workload.source import read_workload
from baton.serve.live.log_file import read_log

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "clusters" / "one-gpu-host.toml"
TALK = """
requests = 40
arrivals = {kind = "poisson", rate_rps = 5}
input_tokens = 200
output_tokens = 40
slo = "fast"
slo_classes.fast = {ttft_s = 30, tpot_s = 1}
conversation = {turns = 4, think_s = 2, followup_tokens = 30}
tenants = [{name = "ann"}, {name = "bob", slo = "slow"}]
[slo_classes.slow]
ttft_s = 60
tpot_s = 1
"""


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / "talk.toml"
    path.write_text(TALK)
    return path


def simulate(trace: Path, *more: str) -> int:
    return main(["sim", "--cluster", str(CLUSTER), "--trace", str(trace), *more])


def test_a_run_leaves_a_page_a_trace_and_a_log_that_replays(
    talk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace, log = tmp_path / "run.html", tmp_path / "run.json", tmp_path / "run.log"
    assert simulate(talk, "--html", str(page), "--perfetto", str(trace), "--log", str(log)) == 0
    text = page.read_text()
    for name in ("Workers over time", "decode-1", "<h2>Tenants</h2>", "SLO attainment, by time of arrival"):
        assert name in text
    names = {event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]}
    assert {"request-0", "prefill on prefill-0", "decode-0 requests"} <= names
    assert main(["replay", str(log)]) == 0
    assert "the same decisions" in capsys.readouterr().out
    assert main(["explain", "request-3", "--log", str(log)]) == 0
    assert "closed: finished" in capsys.readouterr().out
    assert main(["replay", str(log), "--simulate", "--policy", "round-robin"]) == 0
    assert "simulated, round-robin" in capsys.readouterr().out


def test_cells_leave_one_page_one_trace_and_a_log_each(
    talk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names say the cell, results are those of a run that nobody watches, and each log replays alone."""
    cluster = tmp_path / "cells.toml"
    cluster.write_text("cells = 3\n" + CLUSTER.read_text())
    sim = ["sim", "--cluster", str(cluster), "--trace", str(talk), "--json", str(tmp_path / "r.json")]
    assert main(sim) == 0
    plain = json.loads((tmp_path / "r.json").read_text())
    page, trace, log = tmp_path / "run.html", tmp_path / "run.json", tmp_path / "run.log"
    assert main([*sim, "--html", str(page), "--perfetto", str(trace), "--log", str(log)]) == 0
    watched = json.loads((tmp_path / "r.json").read_text())
    assert {**watched, "wall_s": 0} == {**plain, "wall_s": 0}
    text = page.read_text()
    for name in ("<h2>Cells</h2>", "<td>c2</td>", "c0/prefill-0", "c2/decode-1"):
        assert name in text
    events = json.loads(trace.read_bytes())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"c0/request-0", "c2/request-0", "c1/decode-0 requests"} <= names
    assert len({event["id"] for event in events if event["ph"] == "b"}) == plain["requests"] == 40
    assert not log.exists()
    requests = 0
    for number in range(3):
        assert main(["replay", str(tmp_path / f"run.c{number}.log")]) == 0
        assert "the same decisions" in capsys.readouterr().out
        _, decisions = read_log(tmp_path / f"run.c{number}.log")
        requests += sum(isinstance(decision.event, RequestArrived) for decision in decisions)
    assert requests == 40


def test_watching_changes_nothing(talk: Path, tmp_path: Path) -> None:
    """The same results, to the byte but for the time that one waited, with and without somebody who looks."""
    plain, watched = tmp_path / "plain.json", tmp_path / "watched.json"
    simulate(talk, "--json", str(plain))
    simulate(talk, "--json", str(watched), "--html", str(tmp_path / "x.html"), "--log", str(tmp_path / "x.log"))
    results = [json.loads(path.read_text()) for path in (plain, watched)]
    for result in results:
        del result["wall_s"]
    assert results[0] == results[1]


def test_a_turn_comes_after_the_answer_and_its_reader_has_thought(talk: Path) -> None:
    """Two seconds after the close of the turn before, with a prompt of 230 + 40 tokens more or less."""
    arrived: dict[str, tuple[float, int]] = {}
    closed: dict[str, float] = {}

    def tap(decision: Decision) -> None:
        if isinstance(decision.event, RequestArrived):
            request = decision.event.request
            arrived[request.id] = (decision.now_s, request.prompt_tokens)
        closed.update({c.request_id: decision.now_s for c in decision.commands if isinstance(c, CloseRequest)})

    trace = read_workload(talk, seed=5)
    records = replay_trace(load_spec(CLUSTER.read_text()), trace, policy="baton", seed=5, tap=tap)
    later = 0
    latest: dict[str, int] = {}
    for index, request in enumerate(trace.requests):
        before = latest.get(request.session)
        latest[request.session] = index
        if before is None:
            continue
        later += 1
        at_s, prompt_tokens = arrived[f"request-{index}"]
        assert at_s == pytest.approx(closed[f"request-{before}"] + 2.0)
        assert prompt_tokens == request.input_tokens == arrived[f"request-{before}"][1] + 40 + 30
    assert later > 10
    assert len(records) == 40


def test_a_turn_finds_the_answer_before_it_in_the_cache(talk: Path) -> None:
    """Not only its prompt: 270 of 300 tokens are known, and the hit is of whole blocks up to there."""
    trace = read_workload(talk, seed=5)
    records = replay_trace(load_spec(CLUSTER.read_text()), trace, policy="baton", seed=5)
    second = [record for record in records if record.input_tokens == 200 + 40 + 30]
    assert second
    assert {record.cached_tokens for record in second} == {(200 + 40 - 1) // 16 * 16}


def test_requests_are_judged_by_their_own_class(talk: Path, tmp_path: Path) -> None:
    """Admission refuses a TTFT of 1 us unless the cluster is idle. The other class attains its own SLO."""
    talk.write_text(TALK.replace("ttft_s = 30", "ttft_s = 1e-6"))
    out = tmp_path / "r.json"
    assert simulate(talk, "--json", str(out)) == 1
    results = json.loads(out.read_text())
    bob = sum(request.tenant == "bob" for request in read_workload(talk, seed=0).requests)
    assert results["rejected"] > 0
    assert results["completed"] >= bob == round(results["slo"]["attainment_ratio"] * results["requests"])


def test_a_file_that_cannot_be_written_is_told_before_the_run(
    talk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--html",
        str(tmp_path / "no" / "x.html"),
        "--perfetto",
        str(tmp_path),
        "--log",
        str(tmp_path / "no" / "l"),
    )
    assert simulate(talk, *flags) == 2
    said = capsys.readouterr().err
    assert all(f"{flag} " in said for flag in ("--html", "--perfetto", "--log"))


def test_a_log_is_replayed_without_the_config_json_of_its_model(tmp_path: Path) -> None:
    """INV-7: on another machine there is none, and the next model may lie there by then."""
    sizes = {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[[workers]]\nrole = "mixed"\nkind = "a"\n'
        '[kinds.a]\ncost = { model = "roofline", llm = "config.json", hardware = "H100-80G-SXM" }\n'
    )
    expected = read_spec(cluster).cost_model().on("a")
    told = msgspec.json.encode(read_spec(cluster)).decode()
    (tmp_path / "config.json").unlink()
    assert str(tmp_path) not in told
    found = spec_of(SimHeader(cluster=told, policy="baton")).cost_model().on("a")
    assert found == expected
    assert found.prefill_s(new_tokens=1000, cached_tokens=0) > 0


def test_a_log_is_replayed_without_the_file_of_its_cost_model(tmp_path: Path) -> None:
    """INV-7: what a fitted model was made of may be something else by then."""
    fit = FittedCost(start_s=0.01, band_s=(0.001,) * 5, sequence_s=0.0, decode_s=0.0, pair_s=0.0, context_token_s=0.0)
    (tmp_path / "fit.json").write_text(save_fitted(fit))
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[[workers]]\nrole = "mixed"\nkind = "a"\n[kinds.a]\ncost = { model = "fitted", file = "fit.json" }\n'
    )
    spec = read_spec(cluster)
    (tmp_path / "fit.json").unlink()
    told = spec_of(SimHeader(cluster=msgspec.json.encode(spec).decode(), policy="baton"))
    assert told.cost_model().on("a") == fit


def test_policies_and_clusters_are_compared_in_one_table_and_page(
    talk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures of each run are those that it has alone."""
    page, results = tmp_path / "all.html", tmp_path / "all.json"
    slo = ("--ttft-slo-s", "30", "--tpot-slo-s", "1")
    both = ("--policy", "baton", "--policy", "round-robin", "--html", str(page), "--json", str(results))
    assert simulate(talk, *both, *slo) == 0
    shown = capsys.readouterr().out
    runs = json.loads(results.read_text())["runs"]
    assert [run["policy"] for run in runs] == ["baton", "round-robin"]
    for run in runs:
        alone = tmp_path / f"{run['policy']}.json"
        assert simulate(talk, "--policy", run["policy"], "--json", str(alone), *slo) == 0
        assert {**run["results"], "wall_s": 0} == {**json.loads(alone.read_text()), "wall_s": 0}
        assert run["policy"] in shown
        assert f"{run['policy']} on {CLUSTER.name}" in page.read_text()


def test_a_comparison_is_bounded_and_writes_no_log(
    talk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [word for number in range(16) for word in ("--policy", f"p{number}")]
    assert simulate(talk, *many, "--log", str(tmp_path / "x")) == 2
    errors = capsys.readouterr().err
    assert "16 policies on 1 clusters are 16 runs, but at most 15 are compared" in errors
    assert "--log needs one policy and one cluster" in errors
