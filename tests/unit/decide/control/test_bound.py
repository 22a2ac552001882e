"""Who is bound to a decode worker while a prompt is computed elsewhere, and who looks at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.core.messages import (
    CoordinatorCommand,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    SendAhead,
    StartDecode,
    StartPrefill,
    WorkerJoined,
    WorkerLost,
)
from baton.core.ports import CostModel
from baton.core.types import BoundLoad, ClusterView, HostId, Request, RequestId, WorkerId, WorkerView
from baton.decide.control.bound import Bound
from baton.decide.control.coordinator import Coordinator
from baton.decide.policy.predictions import with_bound
from baton.decide.policy.routing import Route
from baton.decide.policy.streaming import WhileComputing
from tests.policies import plain_policies

D0, D1 = WorkerId("d0"), WorkerId("d1")


def request(name: str) -> Request:
    return Request(id=RequestId(name), prompt_tokens=1000, output_tokens_max=40, arrived_at_s=0.0)


def coordinator() -> Coordinator:
    """One prefill worker and two that decode, a host each: prompts go over while they are computed."""
    policies = replace(plain_policies(), streaming=WhileComputing())
    made = Coordinator(policies, block_tokens=16)
    for name, role in (("p", "prefill"), ("d0", "decode"), ("d1", "decode")):
        view = WorkerView(id=WorkerId(name), host=HostId(f"host-of-{name}"), role=role)  # type: ignore[arg-type]
        made.handle(WorkerJoined(view), 0.0)
    return made


def bound_to(commands: list[CoordinatorCommand]) -> list[WorkerId]:
    return [command.worker for command in commands if isinstance(command, SendAhead)]


def test_prompts_that_wait_are_bound_to_all_decode_workers_not_to_the_one_that_is_idle() -> None:
    """All come in one moment: nobody decodes yet, so the load of this moment is the same for every one of them."""
    made = coordinator()
    chosen = [bound_to(made.handle(RequestArrived(request(f"r{place}")), 0.0)) for place in range(4)]
    assert chosen == [[D0], [D1], [D0], [D1]]


def test_who_decodes_has_ended_or_has_lost_its_worker_is_bound_no_more() -> None:
    made = coordinator()
    for name in ("decodes", "cancelled"):
        made.handle(RequestArrived(request(name)), 0.0)
    [start] = made.handle(PrefillFinished(RequestId("decodes"), 1, WorkerId("p"), 1000), 1.0)
    assert isinstance(start, StartDecode)
    assert start.worker == D0
    made.handle(RequestCancelled(RequestId("cancelled")), 1.0)
    assert bound_to(made.handle(RequestArrived(request("next")), 1.0)) == [D1], "d0 decodes one, d1 is idle again"
    again = made.handle(WorkerLost(WorkerId("p"), "killed"), 1.0)
    assert [command.worker for command in again if isinstance(command, StartPrefill)] == [D1], "nobody prefills now"
    assert bound_to(made.handle(RequestArrived(request("last")), 1.0)) == []


class OnOne:
    """Prompts run on the first worker, and go on where they are."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        """Of every worker, how many requests it has."""

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId | Route:
        return Route(worker=candidates[0].id, until="first_token")

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        self.seen.append([view.running_requests for view in cluster.workers])
        return candidates[0].id


def test_who_goes_on_where_its_prompt_is_computed_is_not_counted_there_twice() -> None:
    """Its worker's load has it from the moment on that its prompt was given to it."""
    one = OnOne()
    made = Coordinator(replace(coordinator().policies, routing=one, placement=one), block_tokens=16)
    for name in ("m0", "m1"):
        made.handle(WorkerJoined(WorkerView(id=WorkerId(name), host=HostId(name), role="mixed")), 0.0)
    for name in ("first", "second"):
        made.handle(RequestArrived(request(name)), 0.0)
    assert one.seen == [[0, 0], [1, 0]]


def test_a_request_is_bound_once() -> None:
    bound = Bound()
    bound.bind(request("a"), D0)
    seen = bound.loads
    bound.bind(request("a"), D1)
    bound.bind(request("b"), D1)
    assert (seen, bound.loads) == ({D0: BoundLoad(1, 1000)}, {D1: BoundLoad(2, 2000)})
    for name in ("a", "b", "a", "stranger"):
        bound.release(RequestId(name))
    assert bound.loads == {}


def test_a_look_ahead_counts_what_is_bound_once() -> None:
    busy = WorkerView(id=D0, host=HostId("h"), role="decode", running_requests=3, context_tokens=500)
    idle = WorkerView(id=D1, host=HostId("h"), role="decode")
    bound = {D0: BoundLoad(2, 70), WorkerId("gone"): BoundLoad(1, 9)}
    cluster = ClusterView(workers=(busy, idle), prefix_hit_tokens={}, bound=bound)
    later = with_bound(cluster)
    assert [(view.running_requests, view.context_tokens) for view in later.workers] == [(5, 570), (0, 0)]
    assert with_bound(later) == later
