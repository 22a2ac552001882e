"""The coordinator between workers that die, join and repeat themselves: every request is closed exactly once."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.messages import (
    CloseRequest,
    DecodeBegun,
    HostLost,
    PrefillFinished,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    StartDecode,
    StartPrefill,
    StopRequest,
    WorkerJoined,
    WorkerLost,
)
from baton.core.types import BlockHash, Grammar, HostId, Request, RequestId, Role, Sampling, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.retries import REFUSED_S, Retries, RetryRules
from tests.policies import plain_policies

REQUEST = Request(id=RequestId("r"), prompt_tokens=8, output_tokens_max=8, arrived_at_s=0.0)
R, P, D = REQUEST.id, WorkerId("p"), WorkerId("d")


def cluster(workers: dict[WorkerId, Role], attempts_max: int = 3) -> Coordinator:
    made = Coordinator(plain_policies(), block_tokens=4, retries=Retries(RetryRules(attempts_max=attempts_max)))
    for worker, role in workers.items():
        made.handle(joined(worker, role), 0.0)
    return made


def joined(worker: WorkerId, role: Role) -> WorkerJoined:
    return WorkerJoined(WorkerView(id=worker, host=HostId("h"), role=role))


def test_a_request_goes_from_prefill_to_decode_and_is_closed_once() -> None:
    made = cluster({P: "prefill", D: "decode"})
    assert made.handle(RequestArrived(REQUEST), 0.0) == [StartPrefill(REQUEST, 1, P, "first_token")]
    assert made.handle(PrefillFinished(R, 1, P, 8), 0.0) == [StartDecode(REQUEST, 1, D)]
    end = RequestFinished(R, 1, D, "length")
    assert made.handle(end, 0.0) == [ReleaseBlocks(R), CloseRequest(R, "finished")]
    assert made.handle(end, 0.0) == []
    assert made.handle(RequestCancelled(R), 0.0) == []
    assert made.live_requests == 0


def test_a_repeated_end_of_prefill_does_not_start_the_decode_twice() -> None:
    """One worker may do both legs, so the sender alone does not tell the second message from the first."""
    made = cluster({P: "prefill"})
    made.handle(RequestArrived(REQUEST), 0.0)
    assert made.handle(PrefillFinished(R, 1, P, 8), 0.0) == [StartDecode(REQUEST, 1, P)]
    assert made.handle(PrefillFinished(R, 1, P, 8), 0.0) == []


def test_what_decodes_on_a_mixed_worker_goes_on_after_its_death_and_is_not_prefilled_anew() -> None:
    """Word of an attempt that was given up says nothing about the present one."""
    made = cluster({P: "mixed"})
    made.handle(RequestArrived(REQUEST), 0.0)
    made.handle(DecodeBegun(R, 1, P), 0.0)
    made.handle(WorkerLost(P, "killed"), 0.0)
    assert made.handle(joined(P, "mixed"), 0.0) == [StartDecode(REQUEST, 2, P)]
    other = cluster({P: "mixed"})
    other.handle(RequestArrived(REQUEST), 0.0)
    other.handle(WorkerLost(P, "killed"), 0.0)
    other.handle(DecodeBegun(R, 1, P), 0.0)
    assert other.handle(joined(P, "mixed"), 0.0) == [StartPrefill(REQUEST, 2, P, "end")]


def test_news_of_an_attempt_that_was_given_up_is_dropped() -> None:
    made = cluster({P: "mixed"})
    made.handle(RequestArrived(REQUEST), 0.0)
    assert made.handle(WorkerLost(P, "killed"), 0.0) == []
    assert made.handle(joined(P, "mixed"), 0.0) == [StartPrefill(REQUEST, 2, P, "end")]
    assert made.handle(PrefillFinished(R, 1, P, 8), 0.0) == []
    assert made.handle(RequestFinished(R, 1, P, "stop"), 0.0) == []
    assert made.handle(RequestFinished(R, 2, D, "stop"), 0.0) == []
    assert made.live_requests == 1


def test_a_request_under_which_every_worker_dies_fails_after_its_last_attempt() -> None:
    made = cluster({P: "mixed"}, attempts_max=2)
    made.handle(RequestArrived(REQUEST), 0.0)
    made.handle(WorkerLost(P, "killed"), 0.0)
    made.handle(joined(P, "mixed"), 0.0)
    release, close = made.handle(WorkerLost(P, "out of memory"), 0.0)
    assert release == ReleaseBlocks(R)
    assert isinstance(close, CloseRequest)
    assert (close.outcome, close.reason) == ("failed", "the worker died under it 2 times, last: out of memory")


def test_a_prompt_that_ended_every_worker_is_refused_when_it_is_sent_again() -> None:
    """Before, each copy of it ended as many workers again. Another prompt is served, and this one after a while."""
    made, poison = cluster({P: "mixed"}, attempts_max=2), replace(REQUEST, prompt_hash=BlockHash(b"poison"))
    made.handle(RequestArrived(poison), 0.0)
    made.handle(WorkerLost(P, "killed"), 0.0)
    made.handle(joined(P, "mixed"), 0.0)
    made.handle(WorkerLost(P, "killed"), 1.0)
    made.handle(joined(P, "mixed"), 2.0)
    again = replace(poison, id=RequestId("again"))
    (close,) = made.handle(RequestArrived(again), 3.0)
    assert isinstance(close, CloseRequest)
    assert close.outcome == "failed"
    assert "every worker that ran this prompt died" in close.reason
    others = replace(REQUEST, id=RequestId("other"), prompt_hash=BlockHash(b"other")), replace(again, id=RequestId("s"))
    for other, now_s in zip(others, (4.0, 1.0 + REFUSED_S), strict=True):
        assert isinstance(made.handle(RequestArrived(other), now_s)[0], StartPrefill)


def test_a_prompt_beside_another_on_the_dead_workers_is_not_refused() -> None:
    """Any of them may have ended the workers. Before, the prompts of all were refused."""
    made = cluster({P: "mixed"}, attempts_max=2)
    both = [replace(REQUEST, id=RequestId(name), prompt_hash=BlockHash(name.encode())) for name in "ab"]
    for request in both:
        made.handle(RequestArrived(request), 0.0)
    for now_s in (1.0, 2.0):
        made.handle(WorkerLost(P, "killed"), now_s)
        made.handle(joined(P, "mixed"), now_s)
    assert made.live_requests == 0
    for request in both:
        (start,) = made.handle(RequestArrived(replace(request, id=RequestId(f"{request.id}-again"))), 3.0)
        assert isinstance(start, StartPrefill)


def test_the_loss_of_a_host_counts_against_no_request() -> None:
    """No prompt ends a host. Before, a request failed after it had lost as many hosts as it has attempts."""
    made = cluster({P: "mixed"}, attempts_max=2)
    made.handle(RequestArrived(REQUEST), 0.0)
    for attempt in (2, 3, 4):
        assert made.handle(HostLost(HostId("h"), "no heartbeat"), 1.0) == []
        assert made.handle(joined(P, "mixed"), 1.0) == [StartPrefill(REQUEST, attempt, P, "end")]


def test_a_refused_prompt_runs_with_another_grammar_but_not_with_another_seed() -> None:
    """The grammar may be what ends the workers. The server draws the seed if the client sends none."""
    made, seed = cluster({P: "mixed"}, attempts_max=1), Sampling(seed=1)
    poison = replace(REQUEST, prompt_hash=BlockHash(b"poison"), sampling=seed)
    made.handle(RequestArrived(poison), 0.0)
    made.handle(WorkerLost(P, "killed"), 0.0)
    made.handle(joined(P, "mixed"), 1.0)
    (same,) = made.handle(RequestArrived(replace(poison, sampling=Sampling(seed=2))), 2.0)
    assert isinstance(same, CloseRequest)
    other = replace(poison, sampling=Sampling(seed=1, grammar=Grammar(kind="regex", text="a")))
    assert isinstance(made.handle(RequestArrived(other), 3.0)[0], StartPrefill)


def test_a_cancelled_request_is_stopped_where_it_runs() -> None:
    made = cluster({P: "mixed"})
    made.handle(RequestArrived(REQUEST), 0.0)
    expected = [StopRequest(R, 1, P), ReleaseBlocks(R), CloseRequest(R, "cancelled")]
    assert made.handle(RequestCancelled(R), 0.0) == expected


def test_a_request_that_no_engine_can_compute_fails_at_once_and_alone() -> None:
    """Another attempt would fail alike, and take its neighbours along."""
    made = cluster({P: "mixed"})
    made.handle(RequestArrived(REQUEST), 0.0)
    commands = made.handle(RequestFailed(R, 1, P, "the engine failed on this request"), 1.0)
    assert commands == [
        ReleaseBlocks(R),
        CloseRequest(R, "failed", "the engine failed on this request"),
    ]
    assert made.live_requests == 0
    assert made.handle(RequestFailed(R, 1, P, "again"), 2.0) == []


def test_a_stream_that_is_resumed_after_a_restart_goes_straight_to_decode() -> None:
    """No host has its KV: the decode worker computes prompt and output again, as after the loss of a host."""
    made = cluster({P: "prefill", D: "decode"})
    resumed = replace(REQUEST, resumed_tokens=3)
    assert made.handle(RequestArrived(resumed), 0.0) == [StartDecode(resumed, 1, D)]
    assert made.handle(RequestFinished(R, 1, D, "length"), 1.0) == [ReleaseBlocks(R), CloseRequest(R, "finished")]
