"""One request's story: what the policies saw is recomputed, not made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from msgspec import structs

from baton.core.handoff_paths import HandoffView, LinkView, PathChosen
from baton.core.messages import RequestArrived, RequestFinished
from baton.core.ports import CostModel
from baton.core.ticking import Tick
from baton.core.types import ClusterView, FlightView, LoadWindow, RequestId, WorkerId
from baton.decide.control.cluster_messages import WorkerSaid
from baton.decide.control.decision_log import Decision, decided
from baton.decide.policy.handoff import FirstTokenByDecode
from baton.lab.policies.baselines import RoundRobin
from baton.lab.report.explain import Explanation, explain, find_requests
from baton.lab.report.questions import Notes
from baton.lab.report.timeline import read_timeline
from tests.unit.lab.report.logs import ASKED, D0, D1, EVENTS, NEAR, P0, P1, fresh, joined, log_of, request, said


def story_of(log: list[Decision], request_id: str, **changed: object) -> Explanation:
    """Explain a request. `changed`: see `fresh`."""
    notes = Notes(ranked=RequestId(request_id))
    return explain(fresh(notes, **changed), notes, log, request_id)


def test_a_route_shows_what_each_worker_would_have_cost() -> None:
    """360 cached tokens at p0 were worth the queue there: 0.68 s against 1.04 s."""
    story = story_of(log_of(), "asked")
    admitted, routed, ahead = story.moments[0].questions
    assert (admitted.subject, routed.subject, routed.policy) == ("admit", "prefill", "EarliestFirstToken")
    assert ahead.subject == "decode", "where its KV is sent while the prompt is computed"
    near, far = routed.options
    assert (near.worker, near.hit_tokens, near.queued_tokens, near.report_age_s) == (P0, 360, 200, 0.5)
    assert (far.worker, far.hit_tokens, far.queued_tokens, far.report_age_s) == (P1, 0, 0, None)
    assert near.queue_s is not None
    assert near.prefill_s is not None
    assert near.predicted_s == pytest.approx(near.queue_s + near.prefill_s)
    assert near.predicted_s < far.predicted_s
    assert (routed.chosen, routed.best, story.predicted_ttft_s) == (P0, near, near.ttft_s)


def test_the_order_is_the_policys_own() -> None:
    """Whom it chose, and whom it would have chosen without that one; the question itself changed nothing."""
    story = story_of(log_of(), "asked")
    routed, placed = story.moments[0].questions[1], story.moments[1].questions[0]
    assert [(option.worker, option.rank) for option in routed.options] == [(P0, 1), (P1, 2)]
    assert [(option.worker, option.rank) for option in placed.options] == [(D0, 1), (D1, 2)]
    assert [option.rank for option in story.moments[0].questions[0].options] == [None, None]


def test_a_policy_that_keeps_notes_is_asked_as_a_copy() -> None:
    """Round robin counts its turns: being asked for its order must not move it on."""
    story = story_of(log_of(routing=RoundRobin()), "asked", routing=RoundRobin())
    assert story.differences == 0
    assert [(option.worker, option.rank) for option in story.moments[0].questions[1].options] == [(P0, 2), (P1, 1)]


def chosen(way: PathChosen) -> list[Decision]:
    """The log of a cluster that has chosen a path when the prompt was computed."""
    log = log_of()
    place = next(index for index, entry in enumerate(log) if entry.now_s == 12.75)
    log[place] = structs.replace(log[place], commands=(way, *log[place].commands))
    return log


def test_which_way_its_kv_went_is_told_with_what_was_predicted() -> None:
    roads = {"direct": 0.25, "put": 0.125, "get": 0.0625}
    wanted = HandoffView(
        request=request("asked"),
        tokens=400,
        pooled_tokens=0,
        run_ratio=1.0,
        rest_s=0.0,
        **{name: LinkView(expected_s=expected_s, is_measured=True) for name, expected_s in roads.items()},
    )
    story = story_of(chosen(PathChosen(wanted, "central")), "asked")
    said = next(moment.what for moment in story.moments if "changes hosts" in moment.what)
    predicted = "predicted 250 ms, or 125 ms into the pool and 62.5 ms out of it, 187.5 ms in all"
    assert f"{predicted}; it goes through the pool" in said


def test_what_is_known_of_a_way_is_told_where_it_is_not_measured_or_failed() -> None:
    road = LinkView(expected_s=0.1, is_measured=False, failed_ago_s=2.5)
    wanted = HandoffView(
        request=request("asked"),
        tokens=400,
        pooled_tokens=160,
        direct=road,
        put=road,
        get=road,
        run_ratio=0.5,
        rest_s=0.05,
    )
    story = story_of(chosen(PathChosen(wanted, "central")), "asked")
    said = next(moment.what for moment in story.moments if "changes hosts" in moment.what)
    assert "KV of 400 tokens, 160 of which the pool holds, changes hosts" in said
    assert "predicted 100 ms (not measured, failed 2.5 s ago), or" in said
    assert "and 50 ms to compute the rest, 200 ms in all" in said


@dataclass(frozen=True, slots=True)
class AllToD1:
    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        return {flight.request.id: D1 for flight in flights}


def test_a_move_is_told_with_who_might_have_had_it() -> None:
    """At a tick it goes from d0 to d1: on another host, so its KV goes first."""
    tick = (13.0, Tick(LoadWindow(end_s=13.0, window_s=1.0)))
    story = story_of(log_of([*EVENTS[:10], tick], moves=AllToD1()), "asked", moves=AllToD1())
    assert story.differences == 0
    moved = story.moments[-1]
    assert moved.what == (
        "a policy moves it to another worker; its KV so far is sent to d1 first; "
        "the KV sent ahead has landed; d0 is told to drop it"
    )
    (question,) = moved.questions
    assert (question.subject, question.policy, question.chosen) == ("move", "AllToD1", D1)
    assert [option.worker for option in question.options] == [D0, D1]


def test_the_times_are_those_of_the_log() -> None:
    story = story_of(log_of(), "asked")
    assert (story.arrived_at_s, story.queue_s, story.prefill_s, story.decode_s, story.e2e_s) == (12, 0, 0.75, 2.25, 3)
    assert (story.outcome, story.attempts, story.differences) == ("finished", 2, 0)
    assert (story.output_tokens, story.tpot_s) == (46, 2.25 / 45)


def test_the_first_token_is_known_whoever_drew_it() -> None:
    """One worker that goes on, or decode, to which the worker that computed the prompt has left it."""
    began = WorkerSaid(P0, begun=((RequestId("one"), 1),))
    mixed = [(1.0, joined(P0, NEAR, "mixed")), (2.0, RequestArrived(request("one"))), (2.5, began)]
    end = said(P0, RequestFinished(RequestId("one"), 1, P0, "stop", 5))
    story = story_of(log_of([*mixed, (4.5, end)]), "one")
    assert (story.ttft_s, story.decode_s, story.tpot_s) == (0.5, 2.0, 0.5)
    assert story.moments[1].what == "first token from p0, which continues it"

    end = said(D0, RequestFinished(ASKED, 1, D0, "stop", 5))
    log = log_of(
        [*EVENTS[:10], (13.0, WorkerSaid(D0, begun=((ASKED, 1),))), (15.0, end)], first_token=FirstTokenByDecode()
    )
    story = story_of(log, "asked", first_token=FirstTokenByDecode())
    assert (story.differences, story.ttft_s, story.tpot_s) == (0, 1.0, 0.5)
    assert "p0 computes it to the last prompt token" in story.moments[0].what
    assert story.moments[1].what.startswith("prompt computed by p0, which holds KV of 400 tokens; d0 continues it")
    assert read_timeline(log).requests["asked"].first_token_s == 13.0


def test_a_death_is_a_moment_with_a_question() -> None:
    """Its decode worker died: the one that was made a decode worker goes on, and pulls the KV."""
    story = story_of(log_of(), "asked")
    assert [moment.at_s for moment in story.moments] == [0, 0.75, 1.75, 3]
    moment = story.moments[2]
    assert moment.what == "d0 was lost: killed too; p1 continues it, its KV comes from near (attempt 2)"
    (question,) = moment.questions
    assert (question.subject, question.chosen, [option.worker for option in question.options]) == ("decode", P1, [P1])


def test_a_refusal_comes_with_its_numbers() -> None:
    story = story_of(log_of(), "late")
    (question,) = story.moments[0].questions
    assert story.outcome == "rejected"
    assert question.refusal == story.reason
    assert "later than the SLO of 0.001 s" in story.reason
    assert (story.attempts, story.queue_s, story.e2e_s, story.predicted_ttft_s) == (0, None, None, None)


def test_a_log_that_ends_early_leaves_open_what_it_does_not_know() -> None:
    story = story_of(log_of(EVENTS[:8]), "asked")
    assert (story.outcome, story.prefill_s, story.decode_s, story.e2e_s) == (None, None, None, None)


def test_other_requests_are_no_part_of_it() -> None:
    story = story_of(log_of(), "asked")
    assert {question.request_id for moment in story.moments for question in moment.questions} == {"asked"}


def test_a_clients_id_stands_for_its_choices() -> None:
    """Two choices of one request, and one whose id only begins alike."""
    names = ("x-17-0", "x-17-1", "x-17-0b", "x-y-3-0")
    found = find_requests(log_of([(1.0, RequestArrived(request(name))) for name in names]), "x")
    assert found.ids == ("x-17-0", "x-17-1")
    assert find_requests(log_of(), "asked").ids == ("asked",)


def test_a_request_that_is_not_there_says_which_are() -> None:
    found = find_requests(log_of(), "nobody")
    assert (found.ids, found.requests, found.latest) == ((), 3, ("busy", "asked", "late"))
    with pytest.raises(LookupError, match="nobody"):
        story_of(log_of(), "nobody")


def test_a_log_of_other_decisions_is_told() -> None:
    """The log says that somebody else computed the prompt: what is shown may not be what was seen."""
    log = log_of()
    assert story_of([*log[:7], *log[8:]], "asked").differences > 0


def test_watching_changes_nothing() -> None:
    """The watched cluster gives the commands of the unwatched one, for every event."""
    notes = Notes()
    cluster = fresh(notes)
    for decision in log_of():
        cluster.handle(decision.event, decision.now_s)
        assert decided(decision.now_s, decision.event, cluster.decided) == decision
    assert len(notes.questions) == 10
