"""The size of the fleet: what is missing is asked for once, and somebody always stays to serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.core.messages import (
    CoordinatorCommand,
    RequestArrived,
    RetireWorker,
    SetRole,
    StartPrefill,
    StartWorker,
    WorkerJoined,
    WorkerLost,
)
from baton.core.ports import CostModel
from baton.core.prefixes import BlocksStored
from baton.core.ticking import ScaleWanted, Tick
from baton.core.types import BlockHash, ClusterView, HostId, LoadWindow, Request, RequestId, Role, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.reshaping import START_AGAIN_S
from baton.decide.policy.fleet import FixedFleet, RoleChange, StaticRoles
from tests.policies import plain_policies


@dataclass(slots=True)
class Wanted:
    """Always asks for the same fleet."""

    workers: dict[Role, int] = field(default_factory=dict[Role, int])

    def target(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[Role, int]:
        return self.workers


@dataclass(slots=True)
class Assigned:
    """Gives workers these roles."""

    roles: dict[WorkerId, Role | RoleChange] = field(default_factory=dict[WorkerId, Role | RoleChange])
    seen: list[LoadWindow] = field(default_factory=list[LoadWindow])
    """The last window of each tick."""

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role | RoleChange]:
        self.seen.append(history[-1])
        return self.roles


P0, P1, D0, D1 = (WorkerId(name) for name in ("p0", "p1", "d0", "d1"))


def coordinator(wanted: dict[Role, int], roles: dict[WorkerId, Role | RoleChange] | None = None) -> Coordinator:
    """Two workers of each role, `p0` to `d1`, and policies that want this."""
    policies = replace(plain_policies(), roles=Assigned(roles or {}), scaling=Wanted(wanted))
    made = Coordinator(policies, block_tokens=4)
    for worker in (P0, P1, D0, D1):
        join(made, worker, "prefill" if worker in (P0, P1) else "decode")
    return made


def join(made: Coordinator, worker: WorkerId, role: Role) -> None:
    made.handle(WorkerJoined(WorkerView(id=worker, host=HostId("h"), role=role)), 0.0)


def tick(made: Coordinator, now_s: float = 1.0) -> list[CoordinatorCommand]:
    return made.handle(Tick(LoadWindow(end_s=now_s, window_s=1.0)), now_s)


def arrive(made: Coordinator, name: str = "r") -> WorkerId:
    """Let a request arrive. Return the worker that computes its prompt."""
    request = Request(id=RequestId(name), prompt_tokens=8, block_hashes=(), output_tokens_max=4, arrived_at_s=0.0)
    (start,) = made.handle(RequestArrived(request), 0.0)
    assert isinstance(start, StartPrefill)
    return start.worker


def test_one_worker_stays_while_a_request_runs_whatever_scaling_wants() -> None:
    """Both roles give up all that they have in one tick: three of four go, and the busy one among them drains."""
    made = coordinator({"prefill": 0, "decode": 0})
    busy = arrive(made)
    assert tick(made) == [RetireWorker(P1 if busy == P0 else P0), RetireWorker(D1)]


def test_an_idle_fleet_may_be_retired_as_a_whole() -> None:
    made = coordinator({"prefill": 0, "decode": 0})
    assert tick(made) == [RetireWorker(P1), RetireWorker(P0), RetireWorker(D1), RetireWorker(D0)]


def test_idle_workers_are_retired_first_and_the_youngest_of_them() -> None:
    made = coordinator({"prefill": 1, "decode": 1})
    idle = P1 if arrive(made) == P0 else P0
    assert tick(made) == [RetireWorker(idle), RetireWorker(D1)]


def test_a_missing_worker_is_asked_for_once_until_it_has_joined() -> None:
    made = coordinator({"prefill": 3, "decode": 2})
    (start,) = tick(made)
    assert isinstance(start, StartWorker)
    assert start.role == "prefill"
    assert tick(made) == []
    assert made.starting == {"prefill": 1}
    join(made, start.worker, "prefill")
    assert tick(made) == []
    assert made.starting == {}


def test_a_worker_that_nobody_asked_for_is_not_taken_for_one_that_was() -> None:
    """It crashed and is back: before, the one that is still on its way was asked for a second time."""
    made = coordinator({"prefill": 3, "decode": 2})
    (start,) = tick(made)
    made.handle(WorkerLost(P0, "killed"), 1.5)
    join(made, P0, "prefill")
    assert tick(made, 2.0) == []
    assert made.starting == {"prefill": 1}
    assert isinstance(start, StartWorker)


def test_a_start_that_failed_is_tried_again_after_a_while_under_another_name() -> None:
    """Before, the role never grew again."""
    made = coordinator({"prefill": 3, "decode": 2})
    (first,) = tick(made)
    assert isinstance(first, StartWorker)
    assert made.handle(WorkerLost(first.worker, "no room"), 2.0) == []
    assert made.starting == {}
    assert tick(made, 2.0 + START_AGAIN_S / 2) == []
    (second,) = tick(made, 2.0 + START_AGAIN_S)
    assert isinstance(second, StartWorker)
    assert second.role == "prefill"
    assert second.worker != first.worker


def test_a_failure_of_a_start_that_is_over_is_no_matter() -> None:
    """It joined, and its host died later: neither that nor a name that nobody knows delays the next start."""
    made = coordinator({"prefill": 3, "decode": 2})
    (start,) = tick(made)
    assert isinstance(start, StartWorker)
    join(made, start.worker, "prefill")
    for worker in (start.worker, WorkerId("nobody")):
        made.handle(WorkerLost(worker, "late"), 2.0)
    made.handle(WorkerLost(start.worker, "killed"), 3.0)
    assert [type(command) for command in tick(made, 3.0)] == [StartWorker]


def test_scaling_sees_the_roles_of_the_same_tick() -> None:
    """p1 becomes the third decode worker that is wanted: before, one was started besides, and p1 retired at once."""
    made = coordinator({"prefill": 1, "decode": 3}, roles={P1: "decode"})
    assert tick(made) == [SetRole(P1, "decode")]


def test_a_role_changes_with_the_reason_of_the_policy() -> None:
    changes: dict[WorkerId, Role | RoleChange] = {
        P1: RoleChange(role="mixed", reason="prompts are late"),
        P0: RoleChange(role="prefill", reason="it has this role"),
        WorkerId("gone"): "decode",
    }
    assert tick(coordinator({}, roles=changes)) == [SetRole(P1, "mixed", "prompts are late")]


def test_policies_see_how_many_prompt_tokens_were_cached() -> None:
    made, blocks = coordinator({}), tuple(BlockHash(bytes([number])) for number in range(2))
    made.handle(BlocksStored(HostId("h"), blocks), 0.0)
    for name, tokens in (("a", 12), ("b", 20)):
        request = Request(
            id=RequestId(name), prompt_tokens=tokens, block_hashes=blocks, output_tokens_max=4, arrived_at_s=0.0
        )
        made.handle(RequestArrived(request), 0.5)
    assert isinstance(made.policies.roles, Assigned)
    tick(made)
    tick(made, 2.0)
    counts = [(window.begun_requests, window.cached_tokens) for window in made.policies.roles.seen]
    assert counts == [(2, 16), (0, 0)]


def test_an_administrator_sets_the_workers_of_a_role_whatever_scaling_wants() -> None:
    """Only of that role, from the next tick on, until the policy decides again."""
    made = coordinator({"decode": 1})
    assert made.handle(ScaleWanted("prefill", 1), 0.5) == []
    assert made.handle(ScaleWanted("decode", 2), 0.5) == []
    assert tick(made) == [RetireWorker(P1)]
    made.handle(ScaleWanted("decode", None), 1.5)
    assert tick(made, 2.0) == [RetireWorker(D1)]
    assert made.reshaping.targets == {"prefill": 1, "decode": 1}


def test_no_flip_changes_the_workers_of_a_role_that_an_administrator_has_set() -> None:
    """Before, each flip was followed by the start of a worker, or by the end of one, and the fleet grew or shrank."""
    cases: tuple[tuple[WorkerId, Role], ...] = ((P1, "decode"), (D1, "prefill"))
    for flipped, role in cases:
        made = coordinator({}, roles={flipped: role})
        made.handle(ScaleWanted("prefill", 2), 0.5)
        assert tick(made) == []
        made.handle(ScaleWanted("prefill", None), 1.5)
        assert tick(made, 2.0) == [SetRole(flipped, role)]


def test_a_flip_towards_the_numbers_of_an_administrator_replaces_a_start() -> None:
    made = coordinator({}, roles={P0: "decode", P1: "decode"})
    made.handle(ScaleWanted("prefill", 1), 0.5)
    made.handle(ScaleWanted("decode", 3), 0.5)
    assert tick(made) == [SetRole(P0, "decode")]
    assert tick(made, 2.0) == []


def test_a_worker_that_starts_counts_for_the_number_of_an_administrator() -> None:
    made = coordinator({}, roles={D1: "prefill"})
    made.handle(ScaleWanted("prefill", 3), 0.5)
    (flip,) = tick(made)
    assert flip == SetRole(D1, "prefill")
    made = coordinator({}, roles={})
    made.handle(ScaleWanted("prefill", 3), 0.5)
    (start,) = tick(made)
    assert isinstance(start, StartWorker)
    assert isinstance(made.policies.roles, Assigned)
    made.policies.roles.roles[D1] = "prefill"
    assert tick(made, 2.0) == []


def test_a_fleet_without_a_scaling_policy_needs_ticks_while_an_administrator_sets_its_size() -> None:
    made = Coordinator(replace(coordinator({}).policies, scaling=FixedFleet(), roles=StaticRoles()), block_tokens=4)
    assert not made.needs_ticks
    made.handle(ScaleWanted("prefill", 1), 0.0)
    assert made.needs_ticks
    made.handle(ScaleWanted("prefill", None), 0.0)
    assert not made.needs_ticks
