"""The fleet's loads: what was handed out counts at once, what only the worker knows comes from its reports."""

from __future__ import annotations

import msgspec
import pytest

from baton.core.report_parts import OtherLoad
from baton.core.types import HostId, RequestId, Role, WorkerId, WorkerView
from baton.decide.control.fleet import Fleet

W = WorkerId("w")
A, B = RequestId("a"), RequestId("b")


def reported(
    role: Role = "mixed",
    *,
    newest: RequestId = A,
    queued_tokens: int = 0,
    context_tokens: int = 0,
    at_s: float = 0.0,
) -> WorkerView:
    return WorkerView(
        id=W,
        host=HostId("h"),
        role=role,
        running_requests=99,
        waiting_requests=5,
        queued_tokens=queued_tokens,
        queued_requests=queued_tokens > 0,
        context_tokens=context_tokens,
        observed_at_s=at_s,
        newest_request=newest,
    )


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet()
    made.join(WorkerView(id=W, host=HostId("h"), role="mixed"))
    return made


def only(fleet: Fleet) -> WorkerView:
    (view,) = fleet.views()
    return view


def test_what_was_handed_out_counts_before_any_report(fleet: Fleet) -> None:
    """Two requests in one moment must not both see an idle worker."""
    fleet.load(W, A, 0.0, queued_tokens=30, context_tokens=40)
    fleet.load(W, B, 0.0, queued_tokens=10, context_tokens=10)
    view = only(fleet)
    assert (view.running_requests, view.queued_tokens, view.context_tokens) == (2, 40, 50)


def test_pairs_of_queued_prompts_are_those_of_the_report_and_of_what_was_handed_out_since(fleet: Fleet) -> None:
    """30 new tokens after 10 cached ones have 30 * 10 + 30 * 31 / 2 pairs, 4 after none have 4 * 5 / 2."""
    fleet.load(W, A, 0.0, queued_tokens=30, context_tokens=40)
    assert only(fleet).queued_pairs == 765
    fleet.load(W, B, 0.0, queued_tokens=4, context_tokens=4)
    assert only(fleet).queued_pairs == 775
    half = msgspec.structs.replace(reported(queued_tokens=15), queued_pairs=500.0)
    fleet.report(half, 0.0)
    assert only(fleet).queued_pairs == 510
    fleet.report(reported(queued_tokens=15), 0.0)
    assert only(fleet).queued_pairs == 0, "a worker that does not report them"


def test_the_load_of_others_is_added(fleet: Fleet) -> None:
    """A server of another engine may have clients of its own, whose requests only its report counts."""
    fleet.load(W, A, 0.0, queued_tokens=30, context_tokens=30)
    fleet.report(msgspec.structs.replace(reported(queued_tokens=12), others=OtherLoad(4, 2, 100)), 0.0)
    view = only(fleet)
    assert (view.running_requests, view.queued_requests, view.queued_tokens) == (5, 3, 112)


def test_workers_are_those_of_the_wanted_hosts(fleet: Fleet) -> None:
    other = WorkerView(id=WorkerId("x"), host=HostId("i"), role="decode")
    fleet.join(other)
    assert [view.id for view in fleet.views([other.host])] == ["x"]
    assert fleet.having("prefill", [other.host]) == []
    assert [view.id for view in fleet.having("decode")] == ["w", "x"]


def test_a_mixed_workers_report_tells_that_its_prompts_are_computed(fleet: Fleet) -> None:
    """A mixed worker says nothing between its start and the end of a request: the queue is read from its reports."""
    fleet.load(W, A, 0.0, queued_tokens=30, context_tokens=30)
    fleet.report(reported(queued_tokens=12), 0.0)
    assert only(fleet).queued_tokens == 12
    fleet.report(reported(queued_tokens=0), 0.0)
    assert only(fleet).queued_tokens == 0


def test_what_was_given_since_the_last_report_is_added_to_it(fleet: Fleet) -> None:
    fleet.load(W, A, 0.0, queued_tokens=30, context_tokens=30)
    fleet.report(reported(queued_tokens=12), 0.0)
    fleet.load(W, B, 0.0, queued_tokens=7, context_tokens=7)
    assert only(fleet).queued_tokens == 12 + 7
    fleet.report(reported(newest=B, queued_tokens=15), 0.0)
    assert only(fleet).queued_tokens == 15


def test_a_report_that_does_not_know_of_a_request_yet_does_not_hide_it(fleet: Fleet) -> None:
    """The worker reported while the request was on its way: a policy that believed it would send the next one, too."""
    fleet.load(W, A, 0.0, queued_tokens=30, context_tokens=30)
    fleet.load(W, B, 0.0, queued_tokens=70, context_tokens=70)
    fleet.report(reported(newest=A, queued_tokens=25), 0.0)
    assert only(fleet).queued_tokens == 25 + 70
    fleet.unload(W, B, queued_tokens=70, context_tokens=70)
    assert only(fleet).queued_tokens == 25


def test_a_report_from_before_the_end_does_not_bring_a_finished_prompt_back(fleet: Fleet) -> None:
    fleet.load(W, A, 0.0, queued_tokens=30, context_tokens=30)
    fleet.unload(W, A, queued_tokens=30, context_tokens=30)
    fleet.report(reported(queued_tokens=30), 0.0)
    view = only(fleet)
    assert (view.running_requests, view.queued_tokens) == (0, 0)


def test_a_context_that_has_grown_is_known_from_the_report_alone(fleet: Fleet) -> None:
    fleet.load(W, A, 0.0, queued_tokens=8, context_tokens=8)
    fleet.report(reported(context_tokens=100, at_s=3.0), 0.0)
    view = only(fleet)
    assert (view.context_tokens, view.waiting_requests, view.observed_at_s) == (100, 5, 3.0)
    assert view.running_requests == 1, "counted here, not taken from the report"


def test_a_report_does_not_undo_a_role_that_was_set(fleet: Fleet) -> None:
    fleet.set_role(W, "decode")
    fleet.report(reported("mixed"), 0.0)
    assert only(fleet).role == "decode"
    assert fleet.view(W).role == "decode"


def test_a_worker_that_comes_back_has_no_load(fleet: Fleet) -> None:
    """Its old requests are given to others; their ends must not be taken from the newcomer."""
    fleet.load(W, A, 0.0, queued_tokens=30, context_tokens=30)
    fleet.leave(W)
    assert fleet.views() == ()
    fleet.unload(W, A, queued_tokens=30, context_tokens=30)
    fleet.report(reported(queued_tokens=30), 0.0)
    fleet.set_role(W, "decode")
    assert fleet.views() == ()
    fleet.join(WorkerView(id=W, host=HostId("h"), role="mixed"))
    view = only(fleet)
    assert (view.running_requests, view.queued_tokens, view.context_tokens) == (0, 0, 0)


def test_workers_stand_in_the_order_in_which_they_joined(fleet: Fleet) -> None:
    for name in ("z", "a"):
        fleet.join(WorkerView(id=WorkerId(name), host=HostId("h"), role="mixed"))
    assert [view.id for view in fleet.views()] == ["w", "z", "a"]


def test_it_knows_on_which_hosts_its_workers_are(fleet: Fleet) -> None:
    """Nothing is sent ahead where all are on one host, so a host counts until its last worker has left."""
    far = HostId("far")
    for name in ("x", "y"):
        fleet.join(WorkerView(id=WorkerId(name), host=far, role="decode"))
    assert fleet.hosts == {HostId("h"), far}
    fleet.leave(WorkerId("x"))
    assert fleet.hosts == {HostId("h"), far}
    fleet.leave(WorkerId("y"))
    assert fleet.hosts == {HostId("h")}


def test_a_computed_prompt_on_a_mixed_worker_is_no_longer_queued(fleet: Fleet) -> None:
    """Its request stays and decodes. It was counted among the queued prompts until its end."""
    fleet.load(W, A, 1.0, queued_tokens=30, context_tokens=30)
    fleet.load(W, B, 1.0, queued_tokens=10, context_tokens=10)
    fleet.report(reported(newest=A), 2.0)
    view = only(fleet)
    assert (view.running_requests, view.queued_requests, view.queued_tokens) == (2, 1, 10)
    fleet.unload(W, A, queued_tokens=30, context_tokens=30)
    assert (only(fleet).running_requests, only(fleet).queued_requests) == (1, 1)


def test_a_step_begins_at_the_last_report_or_at_a_later_assignment_to_an_empty_queue(fleet: Fleet) -> None:
    fleet.report(reported(), 2.0)
    fleet.load(W, A, 5.0, queued_tokens=30, context_tokens=30)
    assert fleet.step_began_s == {W: 5.0}
    fleet.load(W, B, 6.0, queued_tokens=30, context_tokens=30)
    assert fleet.step_began_s == {W: 5.0}
    fleet.report(reported(newest=B, queued_tokens=30), 7.0)
    assert fleet.step_began_s == {W: 7.0}
    fleet.leave(W)
    assert fleet.step_began_s == {}
