"""`baton plan`: an answer with its files, and a message with numbers where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.cli.main import main
from baton.core.config import load
from baton.lab.sim.spec import load_spec

QUICK = ["plan", "--llm", "llama3.1-8b", "--input-tokens", "1000", "--output-tokens", "100", "--tp", "1,2"]
SLO = ["--ttft-slo-s", "0.5", "--tpot-slo-s", "0.03"]
PLAYED = ["--requests", "50", "--finalists", "1"]


@pytest.fixture(scope="module", autouse=True)
def short_plays() -> Iterator[None]:
    """Simulate a tenth of the usual requests: other tests are about the length of a play."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.lab.plan.play.PLAYED_MAX", 600)
        patch.setattr("baton.lab.plan.admission.PLAYED_MAX", 200)
        yield


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One plan with every file that it can write."""
    folder = tmp_path_factory.mktemp("plan")
    flags = {"--json": "a.json", "--html": "a.html", "--serve-config": "a.toml", "--kubernetes": "k.yaml",
             "--cluster": "c.yaml"}  # fmt: skip
    files = [word for flag, name in flags.items() for word in (flag, str(folder / name))]
    assert main([*QUICK, *SLO, *PLAYED, "--hardware", "h100=4", *files]) == 0
    return folder


def test_the_answer_says_what_why_and_what_not(answered: Path) -> None:
    found = json.loads((answered / "a.json").read_text())
    assert found["gpus"] <= 4
    assert found["rate_rps"] > 1
    assert found["simulated"]["slo"]["attainment_ratio"] >= 0.9
    assert found["simulated"]["completed"] >= 50
    assert {each["admission"] for each in found["admissions"]} == {"slo", "all"}
    assert found["usd_per_hour"] == pytest.approx(4.7625 * found["gpus"])
    assert found["value"] == pytest.approx(found["rate_rps"] / found["usd_per_hour"])
    why = "\n".join(found["reasons"])
    assert "is bound by memory bandwidth: a step of" in why
    assert "the break-even is at" in why
    assert found["not_recommended"]
    assert {point["shape"] for point in found["frontier"]} == {"disaggregated", "mixed"}
    assert found["links"][0]["buffer_bytes"] % (256 * 2**20) == 0


def test_a_tuned_fleet_has_its_policies_in_the_files_of_its_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mixed worker with a tight TPOT: a published set meets it more often than the default set."""
    monkeypatch.setattr("baton.lab.plan.recommend.TUNING_SIMULATIONS_MAX", 60)
    toml, values = tmp_path / "a.toml", tmp_path / "k.yaml"
    asked = [
        *QUICK,
        "--ttft-slo-s",
        "0.5",
        "--tpot-slo-s",
        "0.012",
        "--finalists",
        "0",
        "--hardware",
        "h100=1",
        "--tune",
    ]
    asked += ["--requests", "60"]
    assert main([*asked, "--serve-config", str(toml), "--kubernetes", str(values)]) == 0
    told = capsys.readouterr()
    name = next(line for line in told.out.splitlines() if line.startswith("- policies: ")).removeprefix("- policies: ")
    assert "at 1.2 times the rate" in told.out
    assert "default set" in told.err
    config = load(toml.read_text())
    assert (config.slo.ttft_s, config.slo.tpot_s) == (0.5, 0.012)
    assert config.policy.name == name
    assert load(msgspec.yaml.decode(values.read_text())["config"]).policy == config.policy


def test_a_program_gets_the_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *SLO, "--finalists", "0", "--hardware", "h100=1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 1


def test_a_pipe_gets_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    """As wide as the table needs: in 80 characters GPUs were cut to `H100-8...`."""
    assert main([*QUICK, *SLO, "--finalists", "0", "--hardware", "h100=1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert any("H100-80G-SXM tp" in row for row in rows)


def test_its_files_are_taken_by_those_that_they_are_for(answered: Path) -> None:
    found = json.loads((answered / "a.json").read_text())
    workers = {role: sum(each["workers"] for each in found["groups"] if each["role"] == role)
               for role in ("prefill", "decode", "mixed")}  # fmt: skip
    config = load((answered / "a.toml").read_text())
    assert config.hosts.expected == sum(workers.values()) > 1
    assert (config.slo.ttft_s, config.slo.tpot_s) == (0.5, 0.03)
    spec = load_spec((answered / "c.yaml").read_text(), form="yaml")
    assert len(spec.views()) == sum(workers.values())
    values = msgspec.yaml.decode((answered / "k.yaml").read_text())
    assert load(values["config"]) == config
    groups = [group for group in values["groups"].values() if group is not None]
    gpus = [group["replicas"] * group["resources"]["limits"]["nvidia.com/gpu"] for group in groups]
    assert sum(gpus) == found["gpus"]


def test_a_plan_that_admits_all_has_no_slo_and_its_file_gives_the_same_bytes_as_its_flags(tmp_path: Path) -> None:
    """Flags override the file. A second run of one seed gives the same bytes."""
    out, config = tmp_path / "a.json", tmp_path / "a.toml"
    files = ["--json", str(out), "--serve-config", str(config)]
    small = ["--requests", "40", "--hardware", "h100=1", "--finalists", "1"]
    assert main([*QUICK, *SLO, *small, "--admission", "all", *files]) == 0
    assert [each["admission"] for each in json.loads(out.read_text())["admissions"]] == ["all"]
    assert load(config.read_text()).slo.ttft_s is None
    path, again = tmp_path / "question.toml", tmp_path / "again.json"
    path.write_text(
        'llm = "llama3.1-8b"\ntp = [1, 2]\nrequests = 40\nfinalists = 1\nhardware = [{name = "h100", gpus = 1}]\n'
        'admission = ["all"]\n[slo]\nttft_s = 9.0\ntpot_s = 0.03\n'
        "[workload]\ninput_tokens = 1000\noutput_tokens = 100\n"
    )
    assert main(["plan", str(path), "--ttft-slo-s", "0.5", "--json", str(again)]) == 0
    assert again.read_bytes() == out.read_bytes()


def test_the_page_stands_alone(answered: Path) -> None:
    page = (answered / "a.html").read_text()
    assert "default-src 'none'" in page
    assert "<script src" not in page
    assert '"type":"curves"' in page
    assert "Not recommended" in page


def test_a_rate_that_the_hardware_does_not_carry_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    code = main([*QUICK, *SLO, "--hardware", "h100=2", "--rate", "500", "--finalists", "0", "--json", str(out)])
    assert code == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "too few GPUs: it carries " in said
    assert " of 500 req/s within" in said
    assert json.loads(out.read_text())["gpus"] <= 2


def test_a_slow_network_makes_disaggregation_pointless(tmp_path: Path) -> None:
    """1 Gb/s: the KV of 1,000 tokens takes a second, computing them 40 ms."""
    question: dict[str, Any] = {
        "llm": "llama3.1-8b", "tp": [1], "finalists": 0, "reach": "network",
        "hardware": [{"name": "h100", "gpus": 16, "link_bytes_per_s": 0.125e9}],
        "slo": {"ttft_s": 0.5, "tpot_s": 0.05}, "workload": {"input_tokens": 1000, "output_tokens": 100},
    }  # fmt: skip
    path, out = tmp_path / "q.yaml", tmp_path / "a.json"
    path.write_bytes(msgspec.yaml.encode(question))
    assert main(["plan", str(path), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {group["role"] for group in found["groups"]} == {"mixed"}
    assert found["verdict"][0].startswith("do not disaggregate: use ")
    assert any("the link makes disaggregation pointless" in line for line in found["reasons"])


def test_prefill_and_decode_may_take_different_hardware(tmp_path: Path) -> None:
    """At a third of an H100's price an A100 decodes for less, and still computes prompts too slowly for theirs."""
    out, values = tmp_path / "a.json", tmp_path / "values.yaml"
    code = main(
        ["plan", "--llm", "llama3.1-70b", "--input-tokens", "1500", "--output-tokens", "250", "--tp", "4",
         "--rate", "100", "--hardware", "h100=64@4.8", "--hardware", "a100=64@1.8", "--objective", "cheapest",
         "--shape", "disaggregated",
         "--ttft-slo-s", "0.8", "--tpot-slo-s", "0.2", "--finalists", "0", "--json", str(out),
         "--kubernetes", str(values)]
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert code == 0
    assert found["rate_rps"] == pytest.approx(100)
    kinds = {group["role"]: group["hardware"] for group in found["groups"]}
    assert kinds == {"prefill": "H100-80G-SXM", "decode": "A100-80G-SXM"}
    groups = msgspec.yaml.decode(values.read_text())["groups"]
    nodes = {group["role"]: group["nodeSelector"]["baton.dev/gpu"] for group in groups.values()}
    assert nodes == kinds
    assert sum(group["replicas"] for group in groups.values()) == sum(group["workers"] for group in found["groups"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hardware", "h100=4", "--ttft-slo-s", "0.001", "--tpot-slo-s", "0.03"],
         ["no hardware meets a TTFT of 0.001 s: the fastest option, H100-80G-SXM tp", "nearest that works:"]),
        (["--hardware", "h100=4", "--ttft-slo-s", "1", "--tpot-slo-s", "0.0001"],
         ["no hardware meets a TPOT of 0.0001 s: the fastest step of one request takes", "nearest that works:"]),
        (["--llm", "llama3.1-405b", "--hardware", "h100=4", *SLO],
         ["does not fit H100-80G-SXM with tp 2", "what fits:"]),
        (["--hardware", "h1000=4", *SLO], ["unknown hardware 'h1000'"]),
        (["--hardware", "h100", *SLO], ["write NAME=GPUS or NAME=GPUS@USD"]),
        (["--hardware", "h100=0", *SLO], ["hardware[0].gpus is 0, but must be above 0"]),
        (["--hardware", "h100=4@0", *SLO], ["hardware[0].usd_per_hour is 0, but must be above 0"]),
        (["--hardware", "h100=4@nan", *SLO], ["hardware[0].usd_per_hour is nan"]),
        (["--hardware", "h100=4", "--tp", "1,0", *SLO], ["tp[1] is 0, but must be at least 1"]),
        (["--hardware", "l40s=4", *SLO], ["no price is known for L40S-48G", "L40S-48G=4@USD"]),
        (["--hardware", "h100=4", "--attainment", "1.5", *SLO], ["slo.attainment_ratio is 1.5"]),
        (["--hardware", "h100=4", "--objective", "cheapest", *SLO], ["objective cheapest needs a rate"]),
        (["--hardware", "h100=4", "--engine", "vlm", *SLO], ["unknown engine 'vlm'"]),
        (["--hardware", "h100=4", "--tp", "two", *SLO], ["write whole numbers"]),
        (["--hardware", "h100=4"], ["needs --ttft-slo-s, --tpot-slo-s"]),
        (["--hardware", "h100=4", "--weights", "fp7", *SLO], ["fp7"]),
        (["--hardware", "h100=4", "--trace", "none.csv", *SLO], ["none.csv"]),
        (["none.toml"], ["cannot read the plan"]),
    ],
)  # fmt: skip
def test_what_cannot_be_answered(flags: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *flags]) == 2
    errors = capsys.readouterr().err
    assert all(words in errors for words in said), errors


def test_numbers_and_lists_that_nothing_can_be_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "q.toml"
    path.write_text(
        'llm = "llama3.1-8b"\nhardware = [{name = "h100", gpus = 4, link_bytes_per_s = 0}]\nweights = []\ntp = []\n'
        "wire = {bytes_per_s = 0}\n[slo]\nttft_s = inf\ntpot_s = 0.03\n"
        "[workload]\ninput_tokens = 10\noutput_tokens = 10\n"
    )
    assert main(["plan", str(path)]) == 2
    errors = capsys.readouterr().err
    wrong = (
        "hardware[0].link_bytes_per_s is 0",
        "wire.bytes_per_s is 0",
        "slo.ttft_s is inf",
        "weights is empty",
        "tp is empty",
    )
    assert all(words in errors for words in wrong), errors


def test_every_problem_of_a_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "q.toml"
    path.write_text(
        'llm = "lama3.1-8b"\nobjectiv = "cheapest"\nhardware = [{name = "h100", gpus = 4, prize = 3.0}]\n'
        "[slo]\nttft_s = 0.5\ntpot_s = 0.03\natainment_ratio = 0.9\n[workload]\ninput_tokens = 10\n"
    )
    assert main(["plan", str(path)]) == 2
    errors = capsys.readouterr().err
    for words in ("objectiv (did you mean 'objective'?)", "hardware[0].prize", "slo.atainment_ratio"):
        assert words in errors
