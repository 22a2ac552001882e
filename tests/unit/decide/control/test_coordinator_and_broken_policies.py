"""A policy may be the user's own. Whatever it raises or returns, it fails the one request that it was asked about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.messages import CloseRequest, RequestArrived, StartPrefill, WorkerJoined
from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, RequestId, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator
from baton.decide.policy.admission import AdmissionPolicy, BoundedQueue
from baton.decide.policy.fairness import FairnessPolicy, FirstComeFirstServed
from tests.policies import plain_policies

GOOD = Request(id=RequestId("good"), prompt_tokens=8, output_tokens_max=8, arrived_at_s=0.0)
BAD = Request(id=RequestId("bad"), prompt_tokens=8, output_tokens_max=8, arrived_at_s=1.0)


class RaisingAdmission:
    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> None:
        if request.id == BAD.id:
            raise KeyError(request.id)


class NonsenseAdmission:
    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> object:
        return "no" if request.id == BAD.id else None


class RaisingFairness:
    def key(self, request: Request) -> tuple[float, ...]:
        if request.id == BAD.id:
            raise KeyError(request.id)
        return (request.arrived_at_s,)


class NonsenseFairness:
    def key(self, request: Request) -> object:
        return (None,) if request.id == BAD.id else (request.arrived_at_s,)


@pytest.mark.parametrize(
    ("admission", "fairness"),
    [
        (RaisingAdmission(), FirstComeFirstServed()),
        (NonsenseAdmission(), FirstComeFirstServed()),
        (BoundedQueue(), RaisingFairness()),
        (BoundedQueue(), NonsenseFairness()),
    ],
    ids=["admission raises", "admission returns nonsense", "fairness raises", "fairness returns nonsense"],
)
def test_a_policy_that_fails_closes_one_request_and_no_other(
    admission: AdmissionPolicy, fairness: FairnessPolicy
) -> None:
    """A fairness policy that raised used to end every worker that joined, and then the server."""
    policies = replace(plain_policies(), admission=admission, fairness=fairness)
    made = Coordinator(policies, block_tokens=4)
    assert made.handle(RequestArrived(GOOD), 0.0) == []
    (close,) = made.handle(RequestArrived(BAD), 1.0)
    assert isinstance(close, CloseRequest)
    assert (close.request_id, close.outcome) == (BAD.id, "failed")
    assert type(fairness).__name__ in close.reason
    assert made.live_requests == 1
    (start,) = made.handle(WorkerJoined(WorkerView(id=WorkerId("w"), host=HostId("h"), role="mixed")), 2.0)
    assert isinstance(start, StartPrefill)
    assert start.request == GOOD
