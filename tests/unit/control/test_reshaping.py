"""The size of the fleet: what is missing is asked for once, and somebody always stays to serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.control.advice import Policies
from baton.control.reshaping import Reshaping
from baton.core.messages import CoordinatorCommand, RetireWorker, StartWorker
from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, LoadWindow, Role, WorkerId, WorkerView
from baton.cost.linear import LinearCost
from baton.policy.admission import BoundedQueue
from baton.policy.fairness import FirstComeFirstServed
from baton.policy.placement import FastestStep
from baton.policy.routing import EarliestFirstToken

WINDOW = LoadWindow(end_s=1.0, window_s=1.0)


@dataclass(slots=True)
class Wanted:
    """Always asks for the same fleet."""

    workers: dict[Role, int] = field(default_factory=dict[Role, int])

    def target(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[Role, int]:
        return self.workers


def cluster(**running_requests: int) -> ClusterView:
    """Two workers of each role, `p0` to `d1`, that run what is said of them."""
    roles: dict[str, Role] = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    workers = tuple(
        WorkerView(id=WorkerId(name), host=HostId("h"), role=role, running_requests=running_requests.get(name, 0))
        for name, role in roles.items()
    )
    return ClusterView(workers=workers, prefix_hit_tokens={})


def tick(reshaping: Reshaping, seen: ClusterView, **workers: int) -> list[CoordinatorCommand]:
    policies = Policies(
        admission=BoundedQueue(),
        routing=EarliestFirstToken(),
        placement=FastestStep(),
        fairness=FirstComeFirstServed(),
        cost=LinearCost(),
        scaling=Wanted({"prefill": workers["prefill"], "decode": workers["decode"]}),
    )
    return reshaping.tick(WINDOW, seen, policies, 1.0)


def test_the_last_worker_of_the_cluster_stays_whatever_scaling_wants() -> None:
    """Both roles give up all that they have in one tick: three of four go."""
    assert tick(Reshaping(), cluster(), prefill=0, decode=0) == [
        RetireWorker(WorkerId("p1")),
        RetireWorker(WorkerId("p0")),
        RetireWorker(WorkerId("d1")),
    ]


def test_only_idle_workers_are_retired_and_the_youngest_first() -> None:
    assert tick(Reshaping(), cluster(p1=1), prefill=1, decode=1) == [
        RetireWorker(WorkerId("p0")),
        RetireWorker(WorkerId("d1")),
    ]


def test_a_missing_worker_is_asked_for_once_until_it_has_joined() -> None:
    reshaping = Reshaping()
    assert tick(reshaping, cluster(), prefill=3, decode=2) == [StartWorker("prefill")]
    assert tick(reshaping, cluster(), prefill=3, decode=2) == []
    reshaping.joined("prefill")
    assert tick(reshaping, cluster(), prefill=3, decode=2) == [StartWorker("prefill")]
