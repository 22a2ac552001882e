"""Whom a choice is among, kept from decision to decision, against the same found anew every time."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from baton.core.types import HostId, WorkerId, WorkerView
from baton.decide.policy.distinct_workers import DistinctWorkers
from tests.unit.decide.policy.views import worker


def found_anew(workers: list[WorkerView], apart: dict[WorkerId, None]) -> set[WorkerId]:
    """The naive implementation: all workers except idle ones that equal an idle worker with a lower id."""
    left: set[WorkerId] = set()
    lowest: dict[object, WorkerId] = {}
    for view in workers:
        if (
            view.running_requests
            or view.queued_requests
            or view.queued_tokens
            or view.context_tokens
            or view.id in apart
        ):
            left.add(view.id)
        else:
            facts = (view.host, view.role, view.kind, view.step_tokens_max, view.requests_max, view.kv_tokens_max)
            lowest[facts] = min(view.id, lowest.get(facts, view.id))
    return left | set(lowest.values())


def changed(draw: Random, workers: list[WorkerView]) -> list[WorkerView]:
    """A worker joins, leaves, changes its place in the order, or changes its load."""
    after = list(workers)
    what = draw.choice(("come", "go", "turn", "work", "work", "work", "rest", "rest", "host"))
    at = draw.randrange(len(after))
    match what:
        case "come":
            after.append(worker(f"w{draw.randrange(1000)}-{len(after)}"))
        case "go" if len(after) > 1:
            del after[at]
        case "turn":
            after.reverse()
        case "work":
            load = draw.choice(("running_requests", "queued_requests", "queued_tokens", "context_tokens"))
            after[at] = replace(after[at], **{load: draw.randint(1, 9)})
        case "host":
            after[at] = replace(after[at], host=HostId(draw.choice(("h", "far"))))
        case _:
            idle = worker(after[at].id, after[at].role, host=after[at].host)
            after[at] = replace(idle, kv_tokens_max=draw.choice((0, 100)))
    return after


def test_incremental_updates_equal_a_new_search() -> None:
    draw, distinct = Random(7), DistinctWorkers()
    workers = [worker(f"w{number}", draw.choice(("prefill", "decode"))) for number in range(12)]
    for _ in range(2000):
        workers = changed(draw, workers)
        apart = dict.fromkeys(view.id for view in workers if draw.random() < draw.choice((0.0, 0.2)))
        among = [view.id for view in distinct.among(workers, apart)]
        assert len(among) == len(set(among))
        assert set(among) == found_anew(workers, apart)


def test_views_that_have_not_changed_are_not_looked_at_again() -> None:
    """What is given out is what was asked about now, not a view of before."""
    distinct, idle, busy = DistinctWorkers(), worker("a"), worker("b", running_requests=1)
    assert distinct.among([idle, busy], {}) == [busy, idle]
    more = replace(busy, running_requests=2)
    assert distinct.among([idle, more], {}) == [more, idle]
    assert distinct.among([], {}) == []
