"""`baton sim`: a cluster file and a trace in, the results of the contract out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.core.errors import ConfigError
from baton.core.types import StepShape
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.summary import Results
from baton.lab.sim.spec import load_spec
from baton.lab.workload.load import read_trace

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "clusters" / "one-gpu-host.toml"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests of the Azure format, four a second."""
    rows = [
        f"2023-11-16 18:15:{index // 4:02d}.{index % 4 * 25:02d}00000,{50 + index},{2 + index % 7}"
        for index in range(40)
    ]
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]).encode()))
    return path


def simulate(trace: Path, out: Path, *more: str) -> dict[str, object]:
    assert main(["sim", "--cluster", str(CLUSTER), "--trace", str(trace), "--json", str(out), *more]) == 0
    return json.loads(out.read_text())


def test_results_have_the_keys_of_the_contract(trace: Path, tmp_path: Path) -> None:
    results = simulate(trace, tmp_path / "r.json", "--ttft-slo-s", "10", "--tpot-slo-s", "10")
    assert tuple(results) == Results.__struct_fields__
    assert (results["requests"], results["completed"], results["failed"]) == (40, 40, 0)
    assert results["slo"] == {"ttft_s": 10.0, "tpot_s": 10.0, "attainment_ratio": 1.0}


def test_every_token_of_the_trace_is_produced(trace: Path, tmp_path: Path) -> None:
    """No policy sees a length, and each answer still has the length that the trace says."""
    results = simulate(trace, tmp_path / "r.json")
    expected = sum(request.output_tokens for request in read_trace(trace).requests)
    rate, duration_s = results["output_tokens_per_s"], results["duration_s"]
    assert isinstance(rate, float)
    assert isinstance(duration_s, float)
    assert rate * duration_s == pytest.approx(expected)


def test_the_same_seed_gives_the_same_results(trace: Path, tmp_path: Path) -> None:
    first = simulate(trace, tmp_path / "1.json", "--seed", "5")
    again = simulate(trace, tmp_path / "2.json", "--seed", "5")
    assert {**first, "wall_s": 0} == {**again, "wall_s": 0}


@pytest.mark.parametrize("policy", sorted(POLICY_SETS))
def test_every_policy_completes_the_trace(policy: str, trace: Path, tmp_path: Path) -> None:
    assert simulate(trace, tmp_path / "r.json", "--policy", policy)["completed"] == 40


def test_a_faster_trace_takes_less_virtual_time(trace: Path, tmp_path: Path) -> None:
    slow = simulate(trace, tmp_path / "1.json", "--limit", "20")
    fast = simulate(trace, tmp_path / "2.json", "--limit", "20", "--rate-scale", "2")
    assert slow["requests"] == fast["requests"] == 20
    assert fast["duration_s"] < slow["duration_s"]  # type: ignore[operator]


def test_a_missed_slo_is_exit_code_1(trace: Path) -> None:
    assert main(["sim", "--cluster", str(CLUSTER), "--trace", str(trace), "--ttft-slo-s", "0.000001"]) == 1


def test_a_prompt_that_no_arena_holds_is_rejected(trace: Path, tmp_path: Path) -> None:
    """4 blocks of 16 tokens hold prompts of up to 63 tokens and room for an answer; 26 of the 40 are longer."""
    cluster = tmp_path / "small.toml"
    cluster.write_text("[topology]\nmixed = 1\n[kv]\nblocks = 4\n")
    out = tmp_path / "r.json"
    assert main(["sim", "--cluster", str(cluster), "--trace", str(trace), "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    assert (results["completed"], results["rejected"]) == (14, 26)


def test_every_bad_argument_is_told_at_once(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "bad.toml"
    cluster.write_text("[kv]\nblokcs = 4\n[cost]\nstep_s = 1\n")
    arguments = ["--policy", "robin-round", "--rate-scale", "0", "--trace", str(tmp_path / "none.csv")]
    assert main(["sim", "--cluster", str(cluster), *arguments]) == 2
    said = capsys.readouterr().err
    for words in (
        "kv.blokcs (did you mean 'blocks'?)",
        "cost.step_s",
        "round-robin, least-load",
        "--rate-scale is 0",
        "none.csv",
    ):
        assert words in said


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1"])
@pytest.mark.parametrize("flag", ["--rate", "--rate-scale"])
def test_a_rate_is_a_number_of_requests(flag: str, value: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--cluster", str(CLUSTER), "--trace", str(trace), f"{flag}={value}"]) == 2
    assert f"{flag} is {value}, but must be above 0 and finite" in capsys.readouterr().err


def test_a_trace_without_times_needs_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n10,3\n12,4\n")
    assert main(["sim", "--cluster", str(CLUSTER), "--trace", str(path)]) == 2
    assert "--rate R" in capsys.readouterr().err
    assert main(["sim", "--cluster", str(CLUSTER), "--trace", str(path), "--arrivals", "bursty"]) == 2
    assert "the trace has no times, so there is no rate to keep; give --rate R" in capsys.readouterr().err
    assert main(["sim", "--cluster", str(CLUSTER), "--trace", str(path), "--rate", "2"]) == 0
    assert main(["sim", "--cluster", str(CLUSTER), "--trace", str(path), "--arrivals", "at-once"]) == 0


def test_new_times_come_at_the_rate_asked_for_or_at_that_of_the_trace(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forty requests over 9.75 s. A metronome's run ends with the answer to who comes after 39 gaps."""
    own = simulate(trace, tmp_path / "1.json", "--arrivals", "constant")
    assert "trace.csv.gz (azure)" in capsys.readouterr().out
    slow = simulate(trace, tmp_path / "2.json", "--arrivals", "constant", "--rate", "1")
    assert own["duration_s"] == pytest.approx(9.75, abs=1.0)
    assert slow["duration_s"] == pytest.approx(39.0, abs=1.0)
    page = tmp_path / "p.html"
    simulate(trace, tmp_path / "3.json", "--arrivals", "bursty,burst_s=2", "--rate", "4", "--html", str(page))
    assert "bursty, burst_ratio 5, burst_s 2, calm_s 50" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--arrivals", "gamma"), "--arrivals: gamma arrivals need cv: write gamma,cv=NUMBER"),
        (("--arrivals", "at-once", "--rate", "2"), "--arrivals at-once and --rate cannot be given together"),
    ],
)
def test_arrivals_that_say_too_little_or_too_much_are_refused(
    flags: tuple[str, ...], words: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--cluster", str(CLUSTER), "--trace", str(trace), *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[kv]\nblocks = 0", "kv.blocks is 0"),
        ("[topology]\nprefill = 0", "no worker"),
        ("[link]\ndelay_min_s = 2.0", "link.delay_max_s is 0.0006, but must be at least 2"),
        ("[link]\ndelay_max_s = inf", "link.delay_max_s is inf"),
        ("[cost]\nprefill_token_s = nan", "cost.prefill_token_s is nan"),
        ("[cost]\ndecode_request_s = -1", "cost.decode_request_s is -1"),
        ("[wire]\noverlap_ratio = 5", "wire.overlap_ratio is 5, but must be between 0 and 1"),
        ("tick_s = 0", "tick_s is 0"),
        ("worker_start_s = -4", "worker_start_s is -4"),
        ("workers = [{role = 'mixed'}, {role = 'decode', count = -1}]", r"workers\[1\].count is -1"),
        ("[kinds.a]\ncost = {model = 'linear'}\nkv = {blocks = 0}", "kinds.a.kv.blocks is 0"),
        ("[kinds.a]\ncost = {model = 'linear'}\nbatch = {requests_max = 0}", "kinds.a.batch.requests_max is 0"),
        (
            "[kinds.a]\ncost = {model = 'linear', prefill_token_s = -1}",
            "kinds.a.cost.prefill_token_s is -1",
        ),
        ("[window]\ntokens = 0", "window.tokens is 0, but must be at least 1"),
        ("[window]\ntokens = 64\nstep_tokens = 0", "window.step_tokens is 0"),
        (
            "[[tiers]]\nbytes_per_s = nan",
            r"tiers\[0\].bytes_per_s is nan, but must be above 0 and finite",
        ),
        ("[[tiers]]\nhost_bytes_per_s = nan", r"tiers\[0\].host_bytes_per_s is nan"),
        ("[topology]\nmixed = 100_001", "over 100,000 workers, .*: divide them into cells"),
        (
            "workers = [{role = 'prefill', count = 60_000}, {role = 'decode', count = 60_000}]",
            "over 100,000 workers",
        ),
        ("workers = [{role = 'mixed'}]\n[topology]\nmixed = 2", "topology and workers are both given"),
        ("[kv]\nblocks = 'many'", "not a valid cluster"),
        ("[kv", "not a TOML file"),
        ("kv = 3", "kv must be a section"),
        ("topolgy = 3", "did you mean 'topology'"),
        ("", "the cluster file is empty"),
        ("[kv]\nblocks = 'many'\n[batch]\nrequests_max = 1.5", r"(?s)kv.blocks.*\n.*batch.requests_max"),
        ("workers = [{role = 'mixed'}, {role = 'chef'}]", r"workers\[1\].role"),
    ],
)
def test_a_bad_cluster_file_says_what_to_change(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_spec(text)


def test_workers_without_a_kind_cost_what_the_cluster_says_beside_others_that_have_one() -> None:
    spec = load_spec(
        "workers = [{role = 'prefill'}, {role = 'decode', kind = 'slow'}]\n"
        "[cost]\nstep_overhead_s = 0.25\n[kinds.slow]\ncost = {model = 'linear', step_overhead_s = 7.0}"
    )
    assert [spec.cost_model().on(view.kind).step_s(StepShape()) for view in spec.views()] == [0.25, 7.0]
