"""`baton explain` names the term that decided between the chosen worker and a sooner one."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from msgspec import structs
from rich.console import Console

from baton.cli.explain import show
from baton.cli.main import main
from baton.core.types import ClusterView, RequestId, Slo, WorkerView
from baton.decide.control.build import build_policies
from baton.decide.policy.slo_headroom import SloHeadroom
from baton.lab.policies.baselines import LeastLoad
from baton.lab.report.explain import Moment, explain
from baton.lab.report.questions import Notes, Question, watched
from tests.unit.decide.policy.views import COST, cluster, request, worker
from tests.unit.lab.report.logs import POLICY, fresh, log_of

SLO = Slo(ttft_s=10.0, tpot_s=0.1)


def questions(view: ClusterView, candidates: list[WorkerView]) -> list[Question]:
    """Ask the default policy for a route and a placement, as a replay does."""
    own = SloHeadroom()
    notes, asked = Notes(ranked=RequestId("r")), request(slo=SLO)
    watching = watched(replace(build_policies(POLICY, COST), admission=own, routing=own, placement=own), notes)
    watching.route(asked, candidates, view)
    watching.place(asked, None, [each for each in view.workers if each.role == "decode"], view)
    return notes.questions


def text_of(question: Question) -> str:
    notes = Notes(ranked=RequestId("asked"))
    story = explain(fresh(notes), notes, log_of(), "asked")
    console = Console(file=io.StringIO(), width=250)
    show(structs.replace(story, moments=(Moment(at_s=0.0, what="arrived", questions=(question,)),)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_sooner_worker_with_more_pressure_is_named_with_its_term() -> None:
    """The decode worker is sooner, but its answers would take 17 ms of 100 ms a token, which counts 1.3 times."""
    behind, busy = worker("p", queued_tokens=900), worker("d", "decode", running_requests=2)
    routed, placed = questions(cluster(behind, busy), [behind])
    assert routed.chosen == "p"
    said = text_of(routed)
    assert "p: d is predicted to be 746.000 ms sooner, but it has a pressure of 0.221 (TPOT of the answers" in said
    assert "p has a pressure of 0.192 (TTFT 1,920 ms of 10,000 ms)" in said
    option = routed.option(routed.chosen)
    assert option is not None
    assert option.weighed is not None
    assert option.queue_s == option.weighed.wait_s
    assert "handoff/token ms" in text_of(placed)


def test_a_policy_with_another_order_is_explained_by_what_its_choice_has_less_of() -> None:
    """The least-loaded policy counts requests: the choice has fewer of them, and more prompt tokens to compute."""
    notes = Notes(ranked=RequestId("r"))
    few, many = worker("a", running_requests=1, queued_tokens=900), worker("b", running_requests=4)
    least = LeastLoad()
    watching = watched(replace(build_policies(POLICY, COST), routing=least, placement=least), notes)
    watching.route(request(), [few, many], cluster(few, many))
    (question,) = notes.questions
    assert question.chosen == "a"
    said = text_of(question)
    assert "ms sooner: LeastLoad does not choose by this time alone; a has fewer requests (1, not 4)" in said


def test_without_an_slo_the_rule_of_roles_is_named() -> None:
    """No worker has a cached prefix, so the decode worker is ruled out by its role alone."""
    behind, idle = worker("p", queued_tokens=900), worker("d", "decode")
    own, notes = SloHeadroom(), Notes(ranked=RequestId("r"))
    watching = watched(replace(build_policies(POLICY, COST), admission=own, routing=own, placement=own), notes)
    watching.route(request(), [behind], cluster(behind, idle))
    said = text_of(notes.questions[0])
    assert "because requests without an SLO follow the roles; p computes prompts" in said


@pytest.mark.parametrize("flag", ["--model", "--api-key", "--api-key-file"])
def test_a_file_takes_no_flag_of_a_server(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "request-0", "--log", "run.log", flag, "a"]) == 2
    assert f"{flag} is for a server, and --log names a file" in capsys.readouterr().err
