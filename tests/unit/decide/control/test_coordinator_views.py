"""What the coordinator shows to policies: hits that can be used, and the queue that it has made itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from baton.core.messages import (
    CloseRequest,
    DecodeBegun,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    StartDecode,
    StartPrefill,
    WorkerJoined,
    WorkerLost,
)
from baton.core.ports import CostModel
from baton.core.prefixes import BlocksStored
from baton.core.types import BlockHash, ClusterView, HostId, Request, RequestId, Slo, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.handoff import FirstTokenByDecode, FirstTokenByPrefill, FirstTokenPolicy
from tests.policies import plain_policies

HOST, P, D = HostId("h"), WorkerId("p"), WorkerId("d")
HASHES = (BlockHash(b"one"), BlockHash(b"two"))


@dataclass(slots=True)
class FirstThatRemembers:
    seen: list[ClusterView] = field(default_factory=list[ClusterView])

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        self.seen.append(cluster)
        return candidates[0].id


def request(name: str) -> Request:
    return Request(id=RequestId(name), prompt_tokens=8, block_hashes=HASHES, output_tokens_max=4, arrived_at_s=0.0)


def test_a_hit_never_covers_the_last_token_and_a_decode_queues_nothing() -> None:
    """All 8 tokens are held in 2 blocks, and the last one is computed all the same: to go on from."""
    routing = FirstThatRemembers()
    policies = dataclasses.replace(plain_policies(), routing=routing)
    made = Coordinator(policies, block_tokens=4)
    made.handle(WorkerJoined(WorkerView(id=P, host=HOST, role="prefill")), 0.0)
    made.handle(WorkerJoined(WorkerView(id=D, host=HOST, role="decode")), 0.0)
    made.handle(BlocksStored(HOST, HASHES[:1]), 0.0)
    made.handle(RequestArrived(request("a")), 0.0)
    made.handle(BlocksStored(HOST, HASHES), 0.0)
    made.handle(RequestArrived(request("b")), 0.0)
    (start,) = made.handle(PrefillFinished(RequestId("a"), 1, P, 8), 0.0)
    assert isinstance(start, StartDecode)
    made.handle(RequestArrived(request("c")), 0.0)
    assert [cluster.prefix_hit_tokens for cluster in routing.seen] == [{HOST: 4}, {HOST: 7}, {HOST: 7}]
    loads = [[view.queued_tokens for view in cluster.workers] for cluster in routing.seen]
    assert loads == [[0, 0], [4, 0], [1, 0]]


def test_an_answer_that_goes_on_elsewhere_leaves_no_load_there() -> None:
    """Its prompt was computed by a mixed worker that died: no other worker may lose tokens from its queue for it."""
    routing = FirstThatRemembers()
    made = Coordinator(dataclasses.replace(plain_policies(), routing=routing), block_tokens=4)
    made.handle(WorkerJoined(WorkerView(id=P, host=HOST, role="mixed")), 0.0)
    made.handle(RequestArrived(request("a")), 0.0)
    made.handle(WorkerJoined(WorkerView(id=D, host=HOST, role="mixed")), 0.0)
    made.handle(DecodeBegun(RequestId("a"), 1, P), 0.0)
    (start,) = made.handle(WorkerLost(P, "it was killed"), 0.0)
    assert isinstance(start, StartDecode)
    made.handle(RequestFinished(RequestId("a"), 2, D, "stop", 4), 0.0)
    made.handle(RequestArrived(request("b")), 0.0)
    assert [view.queued_tokens for view in routing.seen[-1].workers] == [0]


def test_a_promise_is_given_by_who_will_draw_the_first_token() -> None:
    """Prefill alone would be in time; the handoff between two hosts comes before a token that decode draws."""
    cost = LinearCost(
        step_overhead_s=0.0,
        prefill_token_s=0.1,
        decode_request_s=0.01,
        context_token_s=0.0,
        handoff_local_s=0.0,
        handoff_token_s=0.1,
    )

    def answered(first_token: FirstTokenPolicy) -> list[type]:
        policies = dataclasses.replace(
            plain_policies(), routing=FirstThatRemembers(), cost=cost, first_token=first_token
        )
        made = Coordinator(policies, block_tokens=4)
        made.handle(WorkerJoined(WorkerView(id=P, host=HOST, role="prefill")), 0.0)
        made.handle(WorkerJoined(WorkerView(id=D, host=HostId("other"), role="decode")), 0.0)
        made.handle(RequestArrived(request("busy")), 0.0)  # an idle cluster would take every request
        made.handle(PrefillFinished(RequestId("busy"), 1, P, request("busy").prompt_tokens), 0.0)
        asked = replace(request("a"), slo=Slo(ttft_s=1.0, tpot_s=1.0))
        return [type(command) for command in made.handle(RequestArrived(asked), 0.0)]

    assert answered(FirstTokenByPrefill()) == [StartPrefill]
    assert answered(FirstTokenByDecode()) == [CloseRequest]
