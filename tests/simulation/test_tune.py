"""`baton tune`: choose the policies of a fleet by simulation."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from baton.cli.main import main
from baton.cli.policy_choice import policy_of
from baton.core.config import Plugin, PolicyChoice, Topology, load
from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.decide.policy.policy_sets import resolve
from baton.lab.plan.tune import CHANGES, DRAWS, LOADS, PUBLISHED, TunedPolicy, choice_of, draws_of, policy_toml, tune
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace, TraceRequest

SPEC = ClusterSpec(topology=Topology(prefill=2, decode=2))
SHORT, LONG = Slo(ttft_s=1.0, tpot_s=0.06), Slo(ttft_s=60.0, tpot_s=5.0)
"""Targets that long prompts miss even alone, and targets that every request meets."""


def trace(requests: int = 240) -> Trace:
    draw, at_s, made = Random(1), 0.0, list[TraceRequest]()
    for _ in range(requests):
        at_s += draw.expovariate(3.0)
        input_tokens, output_tokens = (1 + round(draw.expovariate(1 / mean)) for mean in (300, 20))
        made.append(TraceRequest(at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens))
    return Trace(format="test", timing="absolute", requests=tuple(made))


def tuned(slo: Slo, *, simulations_max: int = 80) -> TunedPolicy:
    choosing, _ = draws_of(trace(), None, requests_max=40)
    return tune(SPEC, choosing, slo, simulations_max=simulations_max, tell=list[str]().append)


def test_a_better_published_set_is_found_again_and_again() -> None:
    found = tuned(SHORT)
    assert found.choice.name in PUBLISHED
    assert min(own - usual for own, usual in zip(found.ratios, found.default_ratios, strict=True)) > 0.1
    assert found == tuned(SHORT)


def test_the_default_set_stays_if_nothing_is_better() -> None:
    found = tuned(LONG)
    assert found.choice == PolicyChoice()
    assert found.ratios == found.default_ratios == (1.0,) * DRAWS


def test_the_number_of_simulations_is_bounded() -> None:
    assert tuned(SHORT, simulations_max=14).simulations <= 14
    with pytest.raises(ConfigError, match="5 simulations do not suffice for the default set: give at least 6"):
        tuned(SHORT, simulations_max=5)


def test_draws_are_parts_of_their_half_at_every_load() -> None:
    choosing, judging = draws_of(trace(), 10.0, requests_max=30)
    assert [len(draw) for draw in (*choosing, *judging)] == [len(LOADS)] * 2 * DRAWS
    lengths = [[request.input_tokens for request in each.requests] for each in (choosing[0][0], judging[0][0])]
    assert lengths[0] == [request.input_tokens for request in trace().requests[:30]]
    assert lengths[0] != lengths[1]
    assert choosing[0][0].requests[9].at_s * LOADS[0] == pytest.approx(choosing[0][1].requests[9].at_s * LOADS[1])


def test_a_short_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="parts of half of the trace have 6 requests, but need 20 each"):
        draws_of(trace(40), None, requests_max=30)


@pytest.mark.parametrize(
    "choice", [PolicyChoice(), *map(choice_of, CHANGES), *(PolicyChoice(name=x) for x in PUBLISHED)]
)
def test_the_file_of_every_choice_configures_a_server_and_a_simulation(choice: PolicyChoice, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(policy_toml(choice, SHORT, ["a remark"]))
    read = load(path.read_text())
    assert (read.policy, read.slo.ttft_s, read.slo.tpot_s) == (choice, SHORT.ttft_s, SHORT.tpot_s)
    assert policy_of(str(path)) == resolve(choice)
    configured_policies(policy_of(str(path)), SPEC)


def test_one_slack_holds_for_a_step_and_its_prediction() -> None:
    for choice in map(choice_of, CHANGES):
        admission, batching = (use or Plugin(use="") for use in (choice.admission, choice.batching))
        assert admission.options.get("step_slack") == batching.options.get("tpot_slack")


def files(folder: Path, requests: int = 240) -> list[str]:
    cluster, load_file = folder / "cluster.json", folder / "trace.jsonl"
    cluster.write_text(json.dumps({"topology": {"prefill": 2, "decode": 2}}))
    rows = [
        {"timestamp": round(1000 * each.at_s), "input_length": each.input_tokens, "output_length": each.output_tokens}
        for each in trace(requests).requests
    ]
    load_file.write_text("".join(json.dumps({**row, "hash_ids": []}) + "\n" for row in rows))
    return ["tune", "--cluster", str(cluster), "--trace", str(load_file), "--tpot-slo-s", "0.06"]


def test_the_command_writes_a_file_for_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, out = files(tmp_path), tmp_path / "policy.toml"
    more = ["--ttft-slo-s", "1", "--rate", "3", "--simulations", "40", "--requests", "40", "--policy-out", str(out)]
    assert main([*words, *more]) == 0
    printed = capsys.readouterr()
    assert "second half: at 1.2 times the rate" in printed.out
    assert all(f"baton: {name}: " in printed.err for name in ("default set", *PUBLISHED))
    assert policy_of(str(out)) != policy_of("baton")
    assert f"# {printed.out.splitlines()[0]}" in out.read_text()
    assert main(["sim", *words[1:5], "--policy", str(out), "--limit", "5"]) == 0


def test_every_problem_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = files(tmp_path, 9)
    assert main([*words, "--ttft-slo-s", "0", "--rate", "-1", "--policy-out", str(tmp_path / "no" / "x.toml")]) == 2
    told = capsys.readouterr().err
    assert all(each in told for each in ("--ttft-slo-s is 0", "--rate is -1", "--policy-out"))
    assert main([*words, "--ttft-slo-s", "1"]) == 2
    assert "give a longer trace" in capsys.readouterr().err
