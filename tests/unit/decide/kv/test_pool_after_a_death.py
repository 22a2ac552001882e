"""What the host pool does with a request whose worker died at an awkward moment."""

from __future__ import annotations

from baton.core.messages import BlocksGranted, BlocksWanted, PoolCommand, PreemptRequest, StartPrefill, ToWorker
from baton.core.types import HostId, Request, RequestId, Sampling, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.eviction import LeastRecentlyUsed

A, B = WorkerId("a"), WorkerId("b")


def request(name: str, at_s: float, *, prompt_logprobs: bool = False) -> Request:
    sampling = Sampling(prompt_logprobs=prompt_logprobs)
    return Request(id=RequestId(name), prompt_tokens=8, output_tokens_max=8, arrived_at_s=at_s, sampling=sampling)


def pool(blocks: int) -> HostPool:
    return HostPool(host=HostId("h"), blocks_total=blocks, block_tokens=4, eviction=LeastRecentlyUsed)


def want(made: HostPool, name: str, worker: WorkerId, blocks: int, attempt: int = 1) -> list[PoolCommand]:
    return made.handle(BlocksWanted(RequestId(name), attempt, worker, blocks))


def test_a_request_whose_worker_dies_before_it_gave_its_blocks_back_is_served_again() -> None:
    """The restart arrives before the report of the death: no worker is left to answer the preemption."""
    made = pool(4)
    old, young = request("old", 0.0), request("young", 1.0)
    made.handle(StartPrefill(old, 1, A, "end"))
    made.handle(StartPrefill(young, 1, B, "end"))
    want(made, "old", A, 1)
    want(made, "young", B, 2)
    assert want(made, "old", A, 3) == [ToWorker(B, PreemptRequest(young.id, 1))]
    made.handle(StartPrefill(young, 2, A, "end"))
    assert made.table(young.id) == ((), 0)
    granted = want(made, "young", A, 1, attempt=2)
    assert [type(c.command) for c in granted if isinstance(c, ToWorker)] == [BlocksGranted] * len(granted)
    made.check()


def test_prompt_logprobs_start_over_with_the_prompt() -> None:
    """Those of the computed tokens died with the worker: to know them again, every token is computed again."""
    made = pool(4)
    asks = request("asks", 0.0, prompt_logprobs=True)
    made.handle(StartPrefill(asks, 1, A, "end"))
    want(made, "asks", A, 2)
    made.handle(StartPrefill(asks, 2, B, "end"))
    assert made.table(asks.id) == ((), 0)
    made.check()


def test_blocks_freed_by_a_restart_go_to_waiting_requests() -> None:
    """No other event would serve them: a restarted worker may itself wait for them."""
    made = pool(4)
    asks, waits = request("asks", 0.0, prompt_logprobs=True), request("waits", 1.0)
    made.handle(StartPrefill(asks, 1, A, "end"))
    made.handle(StartPrefill(waits, 1, B, "end"))
    want(made, "asks", A, 2)
    assert want(made, "waits", B, 4) == []
    assert made.handle(StartPrefill(asks, 2, B, "end")) == [ToWorker(B, BlocksGranted(waits.id, 1, (0, 1, 2, 3), 0))]
