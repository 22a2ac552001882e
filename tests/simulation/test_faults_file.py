"""`baton sim --faults`: what goes wrong is plain data, strikes when the file says; what cannot be is told at once."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Literal

import pytest
from msgspec.structs import replace

from baton.cli.main import main
from baton.cli.sim import play_cells
from baton.core.config import Topology
from baton.core.errors import ConfigError
from baton.core.types import WorkerId
from baton.decide.policy.policy_sets import policy_set
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.cells import CellJob, cell_jobs
from baton.lab.sim.faults import (
    Death,
    DelaySpike,
    Herd,
    Kill,
    MessageFault,
    Slow,
    TimedFault,
    delayed_arrival_s,
    fault_problems,
    read_faults,
    select_herds,
)
from baton.lab.sim.replay_trace import play_cell
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.lab.workload.request import Trace, TraceRequest

SPEC = ClusterSpec(topology=Topology(prefill=1, decode=1))
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "faults" / "bad-minute.toml"
CLUSTER = EXAMPLE.parents[1] / "clusters" / "one-gpu-host.toml"


def trace(count: int = 20, *, apart_s: float = 0.5) -> Trace:
    requests = tuple(TraceRequest(at_s=apart_s * n, input_tokens=64, output_tokens=4) for n in range(count))
    return Trace(format="test", timing="absolute", requests=requests)


def played(*faults: TimedFault, spec: ClusterSpec = SPEC, of: Trace | None = None) -> list[RequestRecord]:
    """In the order of arrival."""
    records = play_cell(
        CellJob(spec=spec, trace=of or trace(), policy=policy_set("baton"), seed=0, slo=None, faults=faults)
    )
    return sorted(records, key=lambda record: record.arrival_s)


def tpot_s(records: list[RequestRecord]) -> float:
    return fmean(record.tpot_s or 0.0 for record in records)


def test_without_faults_it_is_the_same_run() -> None:
    assert played() == played(Slow(worker=WorkerId("decode-0"), at_s=0.0, for_s=99.0, factor=1.0))


def test_a_slow_worker_is_slow_for_as_long_as_it_says() -> None:
    healthy = played()
    slow = played(Slow(worker=WorkerId("decode-0"), at_s=3.0, for_s=3.0, factor=2.0))
    begins, ends = 7, 11  # those that decode within: requests come every half second, and take less
    assert tpot_s(slow[begins:ends]) == pytest.approx(2 * tpot_s(healthy[begins:ends]), rel=0.1)
    assert tpot_s(slow[:5]) == tpot_s(healthy[:5])
    assert tpot_s(slow[14:]) == pytest.approx(tpot_s(healthy[14:]))


@pytest.mark.parametrize("link", ["to_worker", "from_worker"])
def test_a_lost_control_message_costs_time_and_no_request(link: Literal["to_worker", "from_worker"]) -> None:
    """The message is the last one before a silence: only a ping shows that it is missing."""
    fault = MessageFault(worker=WorkerId("decode-0"), at_s=2.0, link=link, what="lost", ping_s=5.0)
    alone = trace(5)
    records, healthy = played(fault, of=alone), played(of=alone)
    assert [record.outcome for record in records] == ["finished"] * 5
    assert [record.output_tokens for record in records] == [record.output_tokens for record in healthy]
    assert records[:4] == healthy[:4]
    assert records[4].end_s > healthy[4].end_s


@pytest.mark.parametrize("link", ["to_worker", "from_worker"])
def test_a_repeated_control_message_changes_nothing(link: Literal["to_worker", "from_worker"]) -> None:
    fault = MessageFault(worker=WorkerId("decode-0"), at_s=2.0, link=link, what="repeated")
    assert played(fault) == played(Slow(worker=WorkerId("decode-0"), at_s=2.0, for_s=99.0, factor=1.0))


def test_a_dead_worker_loses_no_request_and_makes_those_wait_that_it_had() -> None:
    death = Death(notice_s=0.5, restart_s=1.0)
    records = played(Kill(worker=WorkerId("decode-0"), at_s=2.2, death=death))
    assert [record.outcome for record in records] == ["finished"] * 20
    healthy = played()
    struck = [n for n in range(20) if records[n].end_s - records[n].arrival_s > healthy[n].end_s - healthy[n].arrival_s]
    assert 4 in struck, "it arrived at 2.0 s and was decoding"
    assert struck[0] >= 4


def test_a_herd_comes_together_when_the_server_can_be_reached_again() -> None:
    records = played(Herd(at_s=2.0, for_s=3.0))
    arrivals = [record.arrival_s for record in records]
    assert arrivals.count(5.0) == 7, "those of 2.0 to 4.5 s, and the one of 5.0 s"
    assert not [at_s for at_s in arrivals if 2.0 <= at_s < 5.0]


def test_herds_that_follow_each_other_are_one() -> None:
    later, sooner = Herd(at_s=4.0, for_s=4.0), Herd(at_s=2.0, for_s=3.0)
    herds = select_herds((later, sooner))
    assert [delayed_arrival_s(at_s, herds) for at_s in (1.9, 2.0, 4.5, 7.9, 8.0)] == [1.9, 8.0, 8.0, 8.0, 8.0]


def test_a_herd_holds_back_the_turns_of_conversations_too() -> None:
    """Each turn would come a second after the answer before it: without the herd, some within."""
    turns = [
        TraceRequest(
            at_s=0.1 * talk, input_tokens=64 * (turn + 1), output_tokens=4, session=f"s{talk}", turn=turn,
            think_s=1.0 if turn else None,
        )
        for talk in range(3) for turn in range(5)
    ]  # fmt: skip
    talks = Trace(format="test", timing="absolute", requests=tuple(turns))

    def within(records: list[RequestRecord]) -> list[float]:
        return [record.arrival_s for record in records if 2.0 <= record.arrival_s < 5.0]

    assert len(within(played(of=talks))) > 0
    records = played(Herd(at_s=2.0, for_s=3.0), of=talks)
    assert within(records) == []
    assert [record.arrival_s for record in records].count(5.0) == 3, "every conversation goes on at its end"
    assert [record.outcome for record in records] == ["finished"] * 15


@pytest.mark.parametrize("name", ["faults.toml", "faults.yaml", "faults.json"])
def test_the_three_forms_of_a_file_say_the_same(name: str, tmp_path: Path) -> None:
    """In YAML, a number with an exponent and no point is a word: JSON has a decoder of its own."""
    texts = {
        "faults.toml": "[[faults]]\ntype = 'Herd'\nat_s = 1e1\nfor_s = 5",
        "faults.yaml": "faults:\n- {type: Herd, at_s: 10, for_s: 5}",
        "faults.json": '{"faults": [{"type": "Herd", "at_s": 1e1, "for_s": 5}]}',
    }
    path = tmp_path / name
    path.write_text(texts[name])
    assert read_faults(path, SPEC) == (Herd(at_s=10.0, for_s=5.0),)


def test_names_and_numbers_that_cannot_be_are_told_with_what_there_is() -> None:
    faults = (
        Kill(worker=WorkerId("decod-0"), at_s=-1.0),
        Slow(worker=WorkerId("decode-0"), at_s=0.0, for_s=1.0, factor=0.0),
    )
    assert fault_problems(faults, SPEC) == [
        "faults[0].worker: there is no 'decod-0' (did you mean 'decode-0'?), there is prefill-0, decode-0",
        "faults[0].at_s is -1.0: it must be a time of 0 s or more",
        "faults[1].factor is 0.0: it must be above 0; 2.0 makes steps take twice as long",
    ]


def test_what_names_a_worker_is_of_one_cell_and_what_names_nobody_of_all() -> None:
    """Every cell has a decode-0; a herd is of whoever comes."""
    herd, slow = Herd(at_s=2.0, for_s=3.0), Slow(worker=WorkerId("decode-0"), at_s=0.0, for_s=1.0, factor=2.0)
    cells = replace(SPEC, cells=2)
    assert fault_problems((herd, DelaySpike(at_s=1.0, for_s=1.0, delay_s=0.1)), cells) == []
    (problem,) = fault_problems((herd, slow), cells)
    assert problem.startswith("faults[1]: a Slow names a worker or a host, but each of the 2 cells has one of that")
    assert problem.endswith("simulate one cell: cells = 1 and 1/2 of the requests")
    assert fault_problems((Herd(at_s=-2.0, for_s=3.0),), cells) == [
        "faults[0].at_s is -2.0: it must be a time of 0 s or more"
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_herd_keeps_everybody_from_every_cell(processes: int) -> None:
    herd = Herd(at_s=2.0, for_s=3.0)
    jobs = cell_jobs(replace(SPEC, cells=2), trace(), policy_set("baton"), seed=0, slo=None, faults=(herd,))
    records = play_cells(jobs, processes=processes)
    arrivals = [record.arrival_s for record in records]
    assert arrivals.count(5.0) == 7, "those of 2.0 to 4.5 s, and the one of 5.0 s"
    assert not [at_s for at_s in arrivals if 2.0 <= at_s < 5.0]


def test_the_command_plays_a_herd_on_cells_whether_somebody_watches_or_not(tmp_path: Path) -> None:
    cluster, faults, load = tmp_path / "cells.toml", tmp_path / "herd.toml", tmp_path / "load.toml"
    cluster.write_text("cells = 2")
    faults.write_text("[[faults]]\ntype = 'Herd'\nat_s = 2\nfor_s = 30")
    load.write_text("requests = 20\ninput_tokens = 64\noutput_tokens = 4")
    asked = ["sim", "--cluster", str(cluster), "--trace", str(load), "--processes", "2", "--json"]
    shown: list[dict[str, object]] = []
    for more in ([], ["--faults", str(faults)], ["--faults", str(faults), "--log", str(tmp_path / "run.log")]):
        assert main([*asked, str(tmp_path / "r.json"), *more]) == 0
        shown.append({**json.loads((tmp_path / "r.json").read_text()), "wall_s": 0})
    alone, struck, watched = shown
    assert struck == watched
    assert struck["duration_s"] > alone["duration_s"] + 10  # type: ignore[operator]


def test_a_death_that_takes_a_negative_time_is_told() -> None:
    (problem,) = fault_problems((Kill(worker=WorkerId("decode-0"), at_s=1.0, death=Death(restart_s=-1.0)),), SPEC)
    assert problem == "faults[0].death.restart_s is -1.0: it must be a time of 0 s or more"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[faults]]\ntype = 'Slo'", "faults[0].type is 'Slo' (did you mean 'Slow'?): it must be one of Kill, "),
        ("[[faults]]\nworker = 'x'", "faults[0].type is missing: it must be one of Kill, "),
        ("[[faults]]\ntype = 'Herd'\nat = 1", "unknown key faults[0].at"),
        ("[faults", "not a TOML file"),
        ("", "faults is missing"),
        ("[[faults]]\ntype = 'Herd'\nat_s = -1\nfor_s = 'x'", "faults[0].at_s is -1"),
        ("[[faults]]\ntype = 'Herd'\nat_s = -1\nfor_s = 'x'", "faults[0].for_s is 'x', but must be a number"),
    ],
)
def test_a_file_that_is_none_says_what_is_wrong(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_faults(path, SPEC)
    assert words in str(caught.value)
    assert all(line.startswith(str(path)) for line in str(caught.value).splitlines())


def test_the_example_plays_from_the_command_line_and_a_wrong_file_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f'{{"at_s": {n}, "input_tokens": 100, "output_tokens": 50}}' for n in range(60)]
    (tmp_path / "trace.jsonl").write_text("\n".join(rows) + "\n")
    sim = ["sim", "--cluster", str(CLUSTER), "--trace", str(tmp_path / "trace.jsonl"), "--faults"]
    page = tmp_path / "run.html"
    assert main([*sim, str(EXAMPLE), "--html", str(page)]) == 0
    assert EXAMPLE.name in page.read_text()
    assert main([*sim, str(tmp_path / "none.toml")]) == 2
    assert "cannot read the faults" in capsys.readouterr().err


def test_faults_that_come_too_late_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example on a few requests changed nothing, and nobody said so."""
    (tmp_path / "trace.jsonl").write_text('{"at_s": 0, "input_tokens": 100, "output_tokens": 2}\n')
    sim = ["sim", "--cluster", str(CLUSTER), "--trace", str(tmp_path / "trace.jsonl"), "--faults", str(EXAMPLE)]
    assert main(sim) == 0
    count = len(read_faults(EXAMPLE, read_spec(CLUSTER)))
    assert f"{count} of {count} come after the last request has ended" in capsys.readouterr().out
