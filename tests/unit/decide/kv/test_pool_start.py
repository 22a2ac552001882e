"""A prompt that is alone on its worker gets its first blocks with its start: the worker need not ask."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.copies import LandingWanted
from baton.core.messages import (
    BlocksGranted,
    BlocksSealed,
    BlocksWanted,
    PoolCommand,
    PreemptRequest,
    PrefillFinished,
    ReleaseBlocks,
    RequestDropped,
    StartDecode,
    StartPrefill,
    ToWorker,
    WorkerLost,
)
from baton.core.types import BlockHash, HostId, Request, RequestId, Sampling, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.window import PromptRules, Window
from baton.decide.policy.eviction import LeastRecentlyUsed

A, B = WorkerId("a"), WorkerId("b")
NAMES = tuple(BlockHash(bytes([number])) for number in range(4))


def pool(blocks: int, *, window: Window | None = None) -> HostPool:
    made = HostPool(
        host=HostId("h"),
        blocks_total=blocks,
        block_tokens=4,
        eviction=LeastRecentlyUsed,
        prompts=PromptRules(growth_tokens=4, window=window),
    )
    made.grants.kept_free_blocks = blocks
    return made


def request(name: str, *, prompt: int = 9, names: Sequence[BlockHash] = (), logprobs: bool = False) -> Request:
    sampling = Sampling(prompt_logprobs=logprobs)
    return Request(
        id=RequestId(name),
        prompt_tokens=prompt,
        block_hashes=tuple(names),
        output_tokens_max=100,
        arrived_at_s=0.0,
        sampling=sampling,
    )


def start(made: HostPool, asked: Request, worker: WorkerId = A, attempt: int = 1) -> list[PoolCommand]:
    return made.handle(StartPrefill(asked, attempt, worker, "first_token"))


def test_it_gets_what_its_worker_would_ask_for_and_no_word_besides() -> None:
    """9 tokens and 4 more are 4 blocks; they go with the start, so that nothing is granted."""
    made = pool(10)
    assert start(made, request("alone")) == []
    assert made.table(RequestId("alone")) == ((0, 1, 2, 3), 0)
    made.check()


def test_a_busy_worker_asks_for_blocks_itself() -> None:
    made = pool(20)
    start(made, request("first"))
    start(made, request("second"))
    start(made, request("elsewhere"), B)
    tables = [len(made.table(RequestId(name))[0]) for name in ("first", "second", "elsewhere")]
    assert tables == [4, 0, 4]


def test_a_worker_that_is_done_with_its_requests_is_alone_with_the_next_one() -> None:
    made = pool(20)
    start(made, request("goes on"))
    made.handle(PrefillFinished(RequestId("goes on"), 1, A, 9))
    made.handle(StartDecode(request("goes on"), 1, B))
    start(made, request("next"))
    assert len(made.table(RequestId("next"))[0]) == 4
    made.handle(WorkerLost(A, "killed"))
    start(made, request("after it"))
    assert len(made.table(RequestId("after it"))[0]) == 4


def test_a_worker_that_decodes_is_not_alone() -> None:
    made = pool(20)
    start(made, request("decodes"))
    made.handle(PrefillFinished(RequestId("decodes"), 1, A, 9))
    made.handle(StartDecode(request("decodes"), 1, A))
    start(made, request("waits"))
    assert made.table(RequestId("waits")) == ((), 0)


def test_the_prefix_that_is_here_comes_with_it_and_is_never_the_whole_prompt() -> None:
    made = pool(20)
    start(made, request("teller", prompt=9, names=NAMES[:2]))
    made.handle(BlocksSealed(RequestId("teller"), 1, A, 0, NAMES[:2]))
    start(made, request("longer", prompt=9, names=NAMES[:2]), B)
    table, computed_tokens = made.table(RequestId("longer"))
    assert (table[:2], computed_tokens) == (made.table(RequestId("teller"))[0][:2], 8)
    made.handle(PrefillFinished(RequestId("longer"), 1, B, 9))
    start(made, request("as long", prompt=8, names=NAMES[:2]), B)
    assert made.table(RequestId("as long"))[1] == 4


def test_a_request_with_prompt_logprobs_gets_no_prefix_hit() -> None:
    made = pool(20)
    start(made, request("teller", names=NAMES[:2]))
    made.handle(BlocksSealed(RequestId("teller"), 1, A, 0, NAMES[:2]))
    start(made, request("asks", names=NAMES[:2], logprobs=True), B)
    table, computed_tokens = made.table(RequestId("asks"))
    assert (len(table), computed_tokens) == (4, 0)


def test_where_there_is_no_room_it_is_asked_for_and_waited_for() -> None:
    made = pool(6)
    start(made, request("first"))
    assert start(made, request("second"), B) == []
    assert made.table(RequestId("second")) == ((), 0)
    assert made.handle(BlocksWanted(RequestId("second"), 1, B, 4)) == []
    made.handle(PrefillFinished(RequestId("first"), 1, A, 9))
    (grant,) = made.handle(ReleaseBlocks(RequestId("first")))
    assert isinstance(grant, ToWorker)
    assert grant.command == BlocksGranted(RequestId("second"), 1, made.table(RequestId("second"))[0], 0)


def test_a_start_does_not_overtake_waiting_requests() -> None:
    made = pool(7)
    start(made, request("first"))
    start(made, request("long", prompt=20), B)
    made.handle(BlocksWanted(RequestId("long"), 1, B, 6))
    start(made, request("short", prompt=1), WorkerId("c"))
    assert made.table(RequestId("short")) == ((), 0)


def test_a_returning_request_keeps_its_blocks() -> None:
    made = pool(20)
    start(made, request("moves"))
    before = made.table(RequestId("moves"))
    made.handle(WorkerLost(A, "killed"))
    start(made, request("moves"), B, attempt=2)
    assert made.table(RequestId("moves")) == before


def test_what_is_to_land_is_given_no_blocks_to_compute_in() -> None:
    made = pool(5)
    start(made, request("holder"), B)
    comes = request("comes")
    made.handle(LandingWanted(request=comes, attempt=1, worker=A, blocks=3, prefix=()))
    assert start(made, comes) == []
    assert made.table(comes.id) == ((), 0)


def test_a_request_that_gave_its_blocks_back_for_an_older_one_gets_none_with_a_new_start() -> None:
    made = pool(9)
    young = Request(id=RequestId("young"), prompt_tokens=9, output_tokens_max=100, arrived_at_s=1.0)
    start(made, young)
    start(made, request("old"), B)
    told = made.handle(BlocksWanted(RequestId("old"), 1, B, 9))
    assert told == [ToWorker(A, PreemptRequest(young.id, 1))]
    made.handle(RequestDropped(young.id, 1, A, preempted=True))
    made.handle(WorkerLost(A, "killed"))
    made.handle(PrefillFinished(RequestId("old"), 1, B, 9))
    made.handle(ReleaseBlocks(RequestId("old")))
    start(made, young, A, attempt=2)
    assert made.table(young.id) == ((), 0)


def test_behind_a_window_it_gets_no_more_than_it_sees_ahead() -> None:
    made = pool(20, window=Window(tokens=8, step_tokens=4))
    start(made, request("long", prompt=40, names=()))
    assert len(made.table(RequestId("long"))[0]) == 2
