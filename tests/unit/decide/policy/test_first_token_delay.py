"""If the decode worker samples the first token, the predicted TTFT includes the handoff."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from baton.core.types import ClusterView, HostId, Slo, WorkerView
from baton.decide.policy.admission import AdmissionPolicy, BoundedQueue
from baton.decide.policy.predictions import first_token_delay_s
from baton.decide.policy.routing import EarliestFirstToken, Route, RoutingPolicy
from baton.decide.policy.slo_headroom import SloHeadroom
from baton.lab.policies.cache_aware import GlobalCacheAware
from baton.lab.policies.mooncake import EarlyRejection, PredictedRejection
from tests.unit.decide.policy.views import COST, TRIED, cluster, request, worker

P, D = worker("p", host="a"), worker("d", "decode", host="b", queued_tokens=5000)
"""The decode worker has 5 s of queued prompts, so this prompt is not routed to it."""
ALONE_S = 0.01 + 1.0
"""A prompt of 1,000 tokens."""
WAY_S = 0.0999
"""All its tokens but the last, between hosts."""
STEP_S = 0.011


def view(*workers: WorkerView, by: Literal["prefill", "decode"] = "decode", is_sent_ahead: bool = False) -> ClusterView:
    return replace(cluster(*(workers or (P, D))), first_token_by=by, is_sent_ahead=is_sent_ahead)


@pytest.mark.parametrize("policy", [BoundedQueue(), SloHeadroom(), EarlyRejection(), PredictedRejection()])
def test_a_request_whose_handoff_misses_the_slo_is_rejected(policy: AdmissionPolicy) -> None:
    """1.01 s of work and 0.11 s of handoff and step: too long for 1.1 s, where prefill alone would do it in time."""
    asked = request(slo=Slo(ttft_s=1.1, tpot_s=1.0))
    assert policy.admit(asked, view(by="prefill"), COST, 0.0) is None
    refused = policy.admit(asked, replace(view(by="decode"), errors=TRIED), COST, 0.0)
    assert refused is not None
    assert refused.reject == "slo"


def test_the_handoff_and_a_step_lie_before_the_first_token() -> None:
    def left_s(worker: WorkerView, cluster: ClusterView) -> float:
        return first_token_delay_s(worker, request(), cluster, COST, prompt_s=ALONE_S)

    assert left_s(P, view(by="prefill")) == 0.0
    assert left_s(P, view()) == pytest.approx(WAY_S + STEP_S)
    near = replace(D, host=HostId("a"))
    assert left_s(P, view(P, near)) == pytest.approx(STEP_S), "blocks of one host are handed over at once"
    assert left_s(worker("m", "mixed"), view()) == 0.0, "it goes on with its prompts"
    assert left_s(P, view(P)) == 0.0, "no other worker exists"


def test_of_what_is_sent_ahead_the_last_chunk_is_left_or_what_the_wire_is_behind() -> None:
    chunked = replace(P, step_tokens_max=100)

    def left_s(prompt_s: float) -> float:
        cluster = view(chunked, D, is_sent_ahead=True)
        return first_token_delay_s(chunked, request(), cluster, COST, prompt_s=prompt_s)

    assert left_s(ALONE_S) == pytest.approx(0.01 + STEP_S)
    assert left_s(0.05) == pytest.approx(WAY_S - 0.05 + STEP_S)


@pytest.mark.parametrize("policy", [EarliestFirstToken(), GlobalCacheAware()])
def test_a_prompt_goes_where_decode_is_near_if_that_draws_its_first_token(policy: RoutingPolicy) -> None:
    """50 ms more of work are less than 100 ms of wire."""
    near = worker("q", host="b", queued_tokens=40)
    for by, chosen in (("prefill", "p"), ("decode", "q")):
        shown = view(P, near, D, by=by)
        route = policy.route(request(), [P, near], shown, COST)
        assert (route.worker if isinstance(route, Route) else route) == chosen
