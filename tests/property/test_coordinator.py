"""INV-1 of the coordinator: workers join, die, answer late and twice, clients leave, policies break; all close once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.messages import (
    CloseRequest,
    CoordinatorCommand,
    CoordinatorEvent,
    PrefillFinished,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RoleSet,
    StartDecode,
    StartPrefill,
    StopRequest,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.ports import CostModel
from baton.core.types import (
    ROLES,
    ClusterView,
    HostId,
    Request,
    RequestId,
    Role,
    WorkerId,
    WorkerView,
)
from baton.decide.control.cluster_messages import CoordinatorDecision
from baton.decide.control.coordinator import Coordinator, Policies
from baton.decide.control.retries import Retries, RetryRules
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.admission import BoundedQueue
from baton.decide.policy.fairness import FirstComeFirstServed
from baton.decide.policy.placement import FastestStep
from baton.decide.policy.routing import EarliestFirstToken

ATTEMPTS_MAX = 3
QUEUE_MAX = 6
WORKERS = [WorkerId(f"w{number}") for number in range(3)]
HOST = HostId("h")
workers = st.sampled_from(WORKERS)
roles = st.sampled_from(ROLES)


@dataclass(slots=True)
class SometimesBrokenRouting:
    """A user's policy with bugs: it breaks for the tenants `raises` and `stranger`, and remembers what it was shown."""

    seen: ClusterView | None = None

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        self.seen = cluster
        if request.tenant == "raises":
            raise ZeroDivisionError("no queue")
        if request.tenant == "stranger":
            return WorkerId("nobody")
        return EarliestFirstToken().route(request, candidates, cluster, cost)


@dataclass(frozen=True, slots=True)
class SometimesBrokenPlacement:
    """The same for decode: it breaks for the tenants `raises late` and `stranger late`."""

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        if request.tenant == "raises late":
            raise LookupError("no place")
        if request.tenant == "stranger late":
            return WorkerId("nobody")
        return FastestStep().place(request, source, candidates, cluster, cost)


TENANTS = ["good"] * 6 + ["raises", "stranger", "raises late", "stranger late"]


def coordinator(routing: SometimesBrokenRouting) -> Coordinator:
    policies = Policies(
        admission=BoundedQueue(requests_max=QUEUE_MAX),
        routing=routing,
        placement=SometimesBrokenPlacement(),
        fairness=FirstComeFirstServed(),
        cost=LinearCost(),
    )
    return Coordinator(policies, block_tokens=4, retries=Retries(RetryRules(attempts_max=ATTEMPTS_MAX)))


@dataclass(slots=True)
class Part:
    """One request as the server and its worker see it."""

    request: Request
    attempt: int = 1
    worker: WorkerId | None = None
    decoding: bool = False
    hands_off: bool = False
    closes: list[CloseRequest] = field(default_factory=list[CloseRequest])


class CoordinatorUnderAnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.routing = SometimesBrokenRouting()
        self.coordinator = coordinator(self.routing)
        self.parts: dict[RequestId, Part] = {}
        self.alive: dict[WorkerId, Role] = {}
        self.old: list[PrefillFinished | RequestFinished | RequestCancelled] = []
        self.log: list[CoordinatorDecision] = []
        self.moment_s = 0.0

    # ---- the drivers' side

    def tell(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        self.moment_s += 1.0
        commands = self.coordinator.handle(event, self.moment_s)
        self.log.append(CoordinatorDecision(self.moment_s, event, tuple(commands)))
        for index, command in enumerate(commands):
            self.carry_out(command, commands[:index])
        return commands

    def carry_out(self, command: CoordinatorCommand, before: Sequence[CoordinatorCommand]) -> None:
        match command:
            case StartPrefill() | StartDecode():
                self.take_start(command)
            case StopRequest(request_id=request_id, attempt=attempt, worker=worker):
                part = self.parts[request_id]
                assert (part.attempt, part.worker) == (attempt, worker), "stopped where it does not run"
                assert worker in self.alive, "a command for a worker that is not alive"
                part.worker = None
            case ReleaseBlocks(request_id=request_id):
                assert self.parts[request_id].worker is None, "released under a worker that goes on"
            case CloseRequest(request_id=request_id):
                part = self.parts[request_id]
                assert (ReleaseBlocks(request_id) in before) == (command.outcome != "rejected")
                assert bool(command.reason) == (command.outcome in ("failed", "rejected"))
                assert part.worker is None
                part.closes.append(command)
            case _:
                assert_never(command)

    def take_start(self, command: StartPrefill | StartDecode) -> None:
        part, role = self.parts[command.request.id], self.alive.get(command.worker)
        assert role is not None, "a command for a worker that is not alive"
        assert not part.closes, "started after its end"
        assert part.worker is None, "two workers have one request"
        assert command.attempt == part.attempt <= ATTEMPTS_MAX
        assert isinstance(command, StartDecode) == part.decoding
        wanted: Role = "decode" if part.decoding else "prefill"
        if role not in (wanted, "mixed"):
            assert not {wanted, "mixed"} & set(self.alive.values()), "there is a worker of the right role"
        part.worker = command.worker
        part.hands_off = isinstance(command, StartPrefill) and command.until == "first_token"
        if isinstance(command, StartPrefill):
            assert part.hands_off == (role == "prefill")

    def open(self) -> list[Part]:
        return [part for part in self.parts.values() if not part.closes]

    def running(self) -> list[Part]:
        return [part for part in self.open() if part.worker is not None]

    # ---- clients

    @rule(
        tokens=st.integers(1, 40),
        priority=st.integers(0, 1),
        earlier=st.integers(0, 2),
        tenant=st.sampled_from(TENANTS),
    )
    def arrive(self, tokens: int, priority: int, earlier: int, tenant: str) -> None:
        live = len(self.open())
        request = Request(
            id=RequestId(f"r{len(self.parts)}"),
            prompt_tokens=tokens,
            output_tokens_max=8,
            arrived_at_s=self.moment_s - earlier,
            priority=priority,
            tenant=tenant,
        )
        part = Part(request)
        self.parts[request.id] = part
        self.tell(RequestArrived(request))
        if live >= QUEUE_MAX:
            (close,) = part.closes
            assert (close.outcome, close.reject) == ("rejected", "queue_full")
        elif tenant in ("raises", "stranger") and self.alive:
            (close,) = part.closes
            assert close.outcome == "failed"
            assert "SometimesBrokenRouting" in close.reason
            assert ("no queue" if tenant == "raises" else "nobody") in close.reason
        else:
            assert not part.closes
            assert (part.worker is None) == (not self.alive), "somebody could serve it and nobody does"

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(self.open()))
        event = RequestCancelled(part.request.id)
        self.tell(event)
        self.old.append(event)
        assert [close.outcome for close in part.closes] == ["cancelled"]

    # ---- workers

    @rule(worker=workers, role=roles)
    def join(self, worker: WorkerId, role: Role) -> None:
        """Who has waited is served in the order of the fairness policy: priority, arrival, id."""
        assume(worker not in self.alive)
        waiting = [part for part in self.open() if part.worker is None]
        waiting.sort(key=lambda part: (part.request.priority, part.request.arrived_at_s, part.request.id))
        self.alive[worker] = role
        commands = self.tell(WorkerJoined(WorkerView(id=worker, host=HOST, role=role)))
        served = [command.request.id for command in commands if isinstance(command, StartPrefill | StartDecode)]
        assert served == [part.request.id for part in waiting if not part.closes]
        assert all(part.request.tenant != "good" for part in waiting if part.closes)

    @rule(worker=workers)
    def lose(self, worker: WorkerId) -> None:
        assume(worker in self.alive)
        del self.alive[worker]
        orphans = [part for part in self.open() if part.worker == worker]
        spent = [part for part in orphans if part.attempt == ATTEMPTS_MAX]
        for part in orphans:
            part.worker = None
            part.attempt += part.attempt < ATTEMPTS_MAX
        self.tell(WorkerLost(worker, "killed"))
        for part in orphans:
            if part in spent:
                (close,) = part.closes
                assert (close.outcome, f"{ATTEMPTS_MAX} times" in close.reason) == ("failed", True)
            elif not part.closes:
                assert (part.worker is None) == (not self.alive)

    @rule(worker=workers)
    def lose_again(self, worker: WorkerId) -> None:
        """A death that is reported twice, or of somebody who was never there."""
        assume(worker not in self.alive)
        assert self.tell(WorkerLost(worker, "killed")) == []

    @rule(worker=workers, role=roles)
    def flip(self, worker: WorkerId, role: Role) -> None:
        if worker in self.alive:
            self.alive[worker] = role
        assert self.tell(RoleSet(worker, role)) == []

    @rule(worker=workers, queued=st.integers(0, 90), context=st.integers(0, 90), role=roles)
    def report(self, worker: WorkerId, queued: int, context: int, role: Role) -> None:
        """A view of any age, also of a worker that is gone, also with the role that it had before."""
        view = WorkerView(id=worker, host=HOST, role=role, queued_tokens=queued, context_tokens=context)
        assert self.tell(WorkerReported(view)) == []

    @precondition(lambda self: any(part.hands_off for part in self.running()))
    @rule(data=st.data())
    def hand_off(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from([part for part in self.running() if part.hands_off]))
        assert part.worker is not None
        event = PrefillFinished(part.request.id, part.attempt, part.worker, part.request.prompt_tokens)
        part.worker, part.decoding, part.hands_off = None, True, False
        self.tell(event)
        self.old.append(event)
        if part.request.tenant.endswith("late"):
            assert [close.outcome for close in part.closes] == ["failed"]
            assert "SometimesBrokenPlacement" in part.closes[0].reason
        else:
            assert part.worker is not None

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(self.running()))
        assert part.worker is not None
        event = RequestFinished(part.request.id, part.attempt, part.worker, "length")
        part.worker = None
        assert self.tell(event) == [ReleaseBlocks(part.request.id), CloseRequest(part.request.id, "finished")]
        self.old.append(event)

    # ---- what is not true, or not any more

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def say_it_again(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(self.old))
        assert self.tell(event) == []

    @precondition(lambda self: self.running())
    @rule(data=st.data(), worker=workers, attempt=st.integers(0, ATTEMPTS_MAX), finished=st.booleans())
    def of_a_stranger(self, data: st.DataObject, worker: WorkerId, attempt: int, finished: bool) -> None:
        """Another worker, or another attempt, speaks of a request that runs."""
        part = data.draw(st.sampled_from(self.running()))
        assume((worker, attempt) != (part.worker, part.attempt))
        request_id = part.request.id
        event = (
            RequestFinished(request_id, attempt, worker, "stop")
            if finished
            else PrefillFinished(request_id, attempt, worker, 1)
        )
        assert self.tell(event) == []

    # ---- always, and at the end

    @invariant()
    def every_request_is_closed_at_most_once(self) -> None:
        assert all(len(part.closes) <= 1 for part in self.parts.values())
        assert self.coordinator.live_requests == len(self.open())
        assert len(self.open()) <= QUEUE_MAX

    def teardown(self) -> None:
        """With a worker there, everything ends; loads are back at zero; and the log replays to the same decisions."""
        if not self.alive:
            self.join(WORKERS[0], "mixed")
        while self.running():
            part = self.running()[0]
            assert part.worker is not None
            event = RequestFinished(part.request.id, part.attempt, part.worker, "length")
            part.worker = None
            self.tell(event)
        assert [len(part.closes) for part in self.parts.values()] == [1] * len(self.parts)
        self.check_loads()
        self.check_log()

    def check_loads(self) -> None:
        for worker, role in self.alive.items():
            self.tell(WorkerReported(WorkerView(id=worker, host=HOST, role=role)))
        self.arrive(tokens=4, priority=0, earlier=0, tenant="good")
        assert self.routing.seen is not None
        assert self.routing.seen.waiting_requests == 0
        for view in self.routing.seen.workers:
            assert view.role == self.alive[view.id]
            assert (view.running_requests, view.queued_tokens, view.context_tokens) == (0, 0, 0)

    def check_log(self) -> None:
        stored = msgspec.msgpack.decode(msgspec.msgpack.encode(self.log), type=list[CoordinatorDecision])
        again = coordinator(SometimesBrokenRouting())
        for entry in stored:
            assert tuple(again.handle(entry.event, entry.now_s)) == entry.commands


TestCoordinator = CoordinatorUnderAnyOrder.TestCase
TestCoordinator.settings = settings(max_examples=settings().max_examples * 3 // 2, stateful_step_count=50)
