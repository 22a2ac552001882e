"""The prompts that a batcher computes, and the requests that wait for another request's prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from baton.core.config import BatchLimits
from baton.core.messages import (
    BlocksGranted,
    BlocksSealed,
    BlocksWanted,
    PoolEvent,
    PreemptRequest,
    PrefillFinished,
    RequestDropped,
    RequestFinished,
    StartPrefill,
    StartRequest,
    StepReport,
    StopRequest,
    ToWorker,
)
from baton.core.step import Step, StepResult
from baton.core.types import (
    BlockId,
    HostId,
    Request,
    RequestId,
    Sampling,
    ServiceClass,
    Until,
    WorkerId,
    pack_tokens,
)
from baton.decide.control.batcher import Batcher
from baton.decide.kv.hashing import block_hashes
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.eviction import LeastRecentlyUsed
from tests.property.little_cluster import BLOCK_TOKENS, Arena, new_batcher, next_token, text_alone

W = WorkerId("w")
TEMPLATE = list(range(100, 108))


class Bench:
    """One batcher, one pool, and messages that take no time."""

    def __init__(
        self,
        *,
        step_tokens_max: int = 64,
        blocks: int = 64,
        growth_tokens: int = 4,
        hash_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.hash_tokens = hash_tokens
        limits = BatchLimits(step_tokens_max=step_tokens_max, requests_max=8, growth_tokens=growth_tokens)
        self.batcher: Batcher = new_batcher(W, limits, hash_tokens)
        self.pool = HostPool(
            host=HostId("h"), blocks_total=blocks, block_tokens=BLOCK_TOKENS, eviction=LeastRecentlyUsed
        )
        self.pool.grants.kept_free_blocks = blocks
        self.arena = Arena()
        self.computed: dict[RequestId, int] = {}
        self.reports: list[StepReport] = []

    def start(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        output: int = 4,
        until: Until = "end",
        service: ServiceClass | None = None,
    ) -> Request:
        made = replace(request(name, prompt, output=output, hash_tokens=self.hash_tokens), service=service)
        self.tell(StartPrefill(made, 1, W, until))
        self.batcher.apply([StartRequest(made, 1, pack_tokens(prompt), until)])
        return made

    def tell(self, event: PoolEvent) -> None:
        commands = self.pool.handle(event)
        self.batcher.apply([command.command for command in commands if isinstance(command, ToWorker)])

    def step(self) -> Step:
        """Ask, be answered, plan, compute, report."""
        self.batcher.plan(0.0)
        self.report()
        step = self.batcher.plan(0.0)
        for part in step.slices:
            self.computed[part.request_id] = self.computed.get(part.request_id, 0) + part.count
        self.batcher.commit(step, StepResult([self.arena.compute(part) for part in step.slices]))
        self.report()
        return step

    def report(self) -> None:
        report = self.batcher.take_report(now_s=0.0)
        if report is not None:
            self.reports.append(report)
            for event in report.events:
                self.tell(event)

    def output(self, request_id: str) -> list[int]:
        return [token.token for report in self.reports for token in report.tokens if token.request_id == request_id]


def request(
    name: str,
    prompt: Sequence[int],
    *,
    output: int = 4,
    sampling: Sampling | None = None,
    hash_tokens: int = BLOCK_TOKENS,
) -> Request:
    return Request(
        id=RequestId(name),
        prompt_tokens=len(prompt),
        block_hashes=block_hashes(prompt, block_tokens=hash_tokens),
        output_tokens_max=output,
        arrived_at_s=0.0,
        sampling=sampling or Sampling(),
    )


def in_step(step: Step) -> list[str]:
    return [str(part.request_id) for part in step.slices]


@pytest.mark.parametrize("hash_tokens", [BLOCK_TOKENS, 2, 1])
def test_one_prompt_that_is_asked_for_many_times_together_is_computed_once(hash_tokens: int) -> None:
    """The others wait a step, all start in the next, and compute only what a hit can never hold: the tail.

    The same where tokens are hashed in shorter runs than blocks.
    """
    bench = Bench(hash_tokens=hash_tokens)
    prompt = list(range(20, 42))
    made = [bench.start(name, prompt, output=5) for name in "abcde"]
    assert in_step(bench.step()) == ["a"]
    assert sorted(in_step(bench.step())) == ["a", "b", "c", "d", "e"]
    while bench.step().slices:
        pass
    assert bench.computed == {"a": 22 + 4, "b": 2 + 4, "c": 2 + 4, "d": 2 + 4, "e": 2 + 4}
    assert [bench.output(name) for name in "abcde"] == [text_alone(made[0], prompt)] * 5


def test_one_prompt_for_many_on_a_prefill_worker_does_not_start_them_one_by_one() -> None:
    """The request that computed the prompt was handed off: one request asks for the hit first, then all others."""
    bench = Bench()
    for name in "abcdefgh":
        bench.start(name, list(range(20, 42)), until="first_token")
    assert [len(in_step(bench.step())) for _ in range(4)] == [1, 1, 6, 0]
    assert sum(bench.computed.values()) == 22 + 7 * 2


def test_two_that_share_only_a_template_do_not_wait_for_each_other() -> None:
    """8 of 28 tokens: a hit on them is not worth a step."""
    bench = Bench()
    bench.start("a", [*TEMPLATE, *range(200, 220)])
    bench.start("b", [*TEMPLATE, *range(300, 320)])
    assert sorted(in_step(bench.step())) == ["a", "b"]


@pytest.mark.parametrize(("own", "waits"), [(8, True), (9, False)])
def test_half_of_the_prompt_is_where_waiting_begins_to_pay(own: int, waits: bool) -> None:
    bench = Bench()
    bench.start("a", [*TEMPLATE, *range(200, 220)])
    bench.start("b", [*TEMPLATE, *range(300, 300 + own)])
    assert ("b" not in in_step(bench.step())) == waits


def test_a_request_that_waited_for_a_stopped_one_computes_by_itself() -> None:
    bench = Bench(step_tokens_max=4)
    prompt = list(range(20, 42))
    bench.start("a", prompt)
    bench.start("b", prompt)
    assert in_step(bench.step()) == ["a"]
    bench.batcher.apply([StopRequest(RequestId("a"), 1, W)])
    assert in_step(bench.step()) == ["b"]
    while bench.step().slices:
        pass
    assert bench.computed["b"] == len(prompt) - 4 + 3, "the block that was sealed is a hit; 3 of 4 tokens are computed"
    assert len(bench.output("b")) == 4


def test_a_decode_is_in_every_step_however_many_prompts_there_are() -> None:
    bench = Bench(step_tokens_max=4)
    bench.start("old", [1, 2, 3], output=12)
    bench.step()
    for number in range(4):
        bench.start(f"new{number}", list(range(100 * number + 100, 100 * number + 130)))
    for _ in range(11):
        step = bench.step()
        assert "old" in in_step(step)
        assert step.tokens == 4, "the rest of the step goes to prompts"
    assert len(bench.output("old")) == 12


def test_a_prompt_is_handed_off_after_its_first_token() -> None:
    bench = Bench()
    made = bench.start("a", [1, 2, 3, 4, 5], until="first_token")
    bench.step()
    assert PrefillFinished(made.id, 1, W, 5) in bench.reports[-1].events
    assert bench.output("a") == [next_token([1, 2, 3, 4, 5])]
    assert not bench.step().slices


def test_a_first_token_that_is_the_last_is_an_end_and_no_handoff() -> None:
    bench = Bench()
    made = bench.start("a", [1, 2, 3], output=1, until="first_token")
    bench.step()
    assert bench.reports[-1].events == (RequestFinished(made.id, 1, W, "length", 1),)


def test_a_stop_token_at_the_last_place_is_a_stop() -> None:
    prompt = [1, 2, 3]
    stop = next_token(prompt)
    batcher = new_batcher(W, BatchLimits())
    made = request("a", prompt, output=1, sampling=Sampling(stop_token_ids=(stop,)))
    batcher.apply([StartRequest(made, 1, pack_tokens(prompt), "end", (BlockId(0),), 0)])
    step = batcher.plan(0.0)
    batcher.commit(step, StepResult([Arena().compute(step.slices[0])]))
    report = batcher.take_report(now_s=0.0)
    assert report is not None
    assert report.events == (RequestFinished(made.id, 1, W, "stop", 1),)


def test_a_grant_from_before_a_preemption_is_not_taken() -> None:
    """The preemption returned the granted blocks to the pool: another request writes them now."""
    prompt = list(range(8))
    made = request("a", prompt)
    batcher = new_batcher(W, BatchLimits())
    batcher.apply([StartRequest(made, 1, pack_tokens(prompt), "end")])
    batcher.plan(0.0)
    batcher.apply([BlocksGranted(made.id, 1, (BlockId(1), BlockId(2), BlockId(3)), 0), PreemptRequest(made.id, 1)])
    batcher.apply([BlocksGranted(made.id, 1, (BlockId(1), BlockId(2), BlockId(3)), 0)])
    assert batcher.plan(0.0).slices == ()
    report = batcher.take_report(now_s=0.0)
    assert report is not None
    kinds = [type(event) for event in report.events]
    assert kinds == [BlocksWanted, RequestDropped, BlocksWanted]
    view = batcher.view(0.0)
    assert (view.running_requests, view.waiting_requests, view.queued_tokens) == (0, 1, 8)
    assert view.queued_pairs == 8 * 9 / 2


def test_a_late_grant_that_is_shorter_takes_no_block_away() -> None:
    prompt = list(range(6))
    made = request("a", prompt)
    batcher = new_batcher(W, BatchLimits())
    table = (BlockId(1), BlockId(2), BlockId(3))
    batcher.apply([StartRequest(made, 1, pack_tokens(prompt), "end", table, 0)])
    batcher.apply([BlocksGranted(made.id, 1, table[:1], 0)])
    (part,) = batcher.plan(0.0).slices
    assert tuple(part.block_table) == table


def test_a_newer_attempt_takes_the_place_of_the_older_one() -> None:
    prompt = list(range(6))
    made = request("a", prompt)
    batcher = new_batcher(W, BatchLimits())
    batcher.apply([StartRequest(made, 1, pack_tokens(prompt), "end", (BlockId(1), BlockId(2)), 0)])
    batcher.apply([StartRequest(made, 2, pack_tokens([*prompt, 9]), "end", (BlockId(5), BlockId(6)), 4)])
    (part,) = batcher.plan(0.0).slices
    assert (list(part.tokens), tuple(part.block_table), part.start) == ([*prompt, 9], (5, 6), 4)
    batcher.apply([StartRequest(made, 1, pack_tokens(prompt), "end", (BlockId(1), BlockId(2)), 0)])
    (part,) = batcher.plan(0.0).slices
    assert tuple(part.block_table) == (5, 6)


def test_the_next_block_is_asked_for_before_it_is_needed_and_none_beyond_the_end() -> None:
    """A worker never waits for the pool in a step; and it asks for no block that the request cannot fill."""
    bench = Bench()
    bench.start("a", list(range(6)), output=10)
    while (step := bench.step()).slices:
        assert len(step.slices[0].block_table) * BLOCK_TOKENS >= len(step.slices[0].tokens)
    wanted = [event.blocks for report in bench.reports for event in report.events if isinstance(event, BlocksWanted)]
    assert wanted == [3, 4]
    assert len(bench.output("a")) == 10


def test_a_request_granted_extra_room_does_not_ask_again() -> None:
    """The second grant, to a request that decodes, is 8 blocks where it asked for 4: 9 is the next that it asks for."""
    bench = Bench(blocks=16)
    bench.start("a", list(range(6)), output=30)
    bench.step()
    bench.pool.grants.kept_free_blocks = 4
    while bench.step().slices:
        pass
    wanted = [event.blocks for report in bench.reports for event in report.events if isinstance(event, BlocksWanted)]
    assert wanted == [3, 4, 9]
    assert len(bench.output("a")) == 30


def test_steps_that_only_decode_are_no_news_of_the_load() -> None:
    """The coordinator is told of joins, prompts, questions and ends; that a request decodes on, it foresees."""
    bench = Bench(growth_tokens=64)
    bench.start("a", list(range(6)), output=10)
    while bench.step().slices:
        pass
    news = [report.is_load_new for report in bench.reports]
    decoding = [
        not report.started and all(isinstance(event, BlocksSealed) for event in report.events)
        for report in bench.reports
    ]
    assert sum(decoding) >= 8, "nine steps decode, and the last one ends the request"
    assert [not new for new in news][2:] == decoding[2:]
    assert news[0]
    assert news[1]


def test_a_request_asks_for_as_much_room_at_a_time_as_the_limits_say() -> None:
    """6 prompt tokens and 12 more: 5 blocks; 8 when 4 tokens of them are left, and the end needs no more than 8."""
    bench = Bench(growth_tokens=12)
    bench.start("a", list(range(6)), output=26)
    while bench.step().slices:
        pass
    wanted = [event.blocks for report in bench.reports for event in report.events if isinstance(event, BlocksWanted)]
    assert wanted == [5, 8]
    assert len(bench.output("a")) == 26


def test_no_more_requests_hold_blocks_than_run_at_once() -> None:
    """What waits in the batcher takes its prefix hit when its turn comes, not before."""
    bench = Bench(step_tokens_max=512)
    for number in range(12):
        bench.start(f"r{number:02}", [number * 50 + position for position in range(6)])
    assert in_step(bench.step()) == [f"r{number:02}" for number in range(8)]
    assert bench.pool.blocks_of(W) == 8 * 3


def test_prompts_are_not_asked_for_further_ahead_than_two_steps() -> None:
    bench = Bench(step_tokens_max=8)
    for number in range(8):
        bench.start(f"r{number}", [number * 50 + position for position in range(8)])
    bench.step()
    assert bench.batcher.view(0.0).waiting_requests == 6


def wants(batcher: Batcher) -> list[str]:
    report = batcher.take_report(now_s=0.0)
    events = report.events if report is not None else ()
    return [str(event.request_id) for event in events if isinstance(event, BlocksWanted)]


def test_what_is_owed_an_answer_is_not_asked_for_again() -> None:
    prompt = list(range(8))
    batcher = new_batcher(W, BatchLimits())
    batcher.apply([StartRequest(request("a", prompt), 1, pack_tokens(prompt), "end")])
    batcher.plan(0.0)
    assert wants(batcher) == ["a"]
    batcher.plan(0.0)
    assert wants(batcher) == []


def test_a_request_does_not_wait_for_one_that_asks_for_held_blocks() -> None:
    """The second one's answer is late; the third need not wait for it, since the first has sealed the prompt."""
    prompt = list(range(8))
    batcher = new_batcher(W, BatchLimits())
    table = (BlockId(0), BlockId(1), BlockId(2))
    batcher.apply([StartRequest(request("a", prompt), 1, pack_tokens([*prompt, 9]), "end", table, 8)])
    for name in ("b", "c"):
        batcher.apply([StartRequest(request(name, prompt), 1, pack_tokens(prompt), "end")])
        batcher.plan(0.0)
        assert wants(batcher) == [name]


def test_where_all_is_computed_the_last_token_is_computed_again() -> None:
    """A worker died between the seal and the token: the next attempt must compute the token."""
    prompt = list(range(8))
    batcher = new_batcher(W, BatchLimits())
    table = (BlockId(0), BlockId(1))
    batcher.apply([StartRequest(request("a", prompt), 2, pack_tokens(prompt), "end", table, 8)])
    (part,) = batcher.plan(0.0).slices
    assert (part.start, part.count, part.sample) == (7, 1, True)


def test_log_probabilities_of_a_prompt_that_is_computed_twice_are_told_once() -> None:
    prompt = list(range(20, 28))
    made = request("a", prompt, sampling=Sampling(prompt_logprobs=True))
    batcher, arena = new_batcher(W, BatchLimits(step_tokens_max=5)), Arena()
    batcher.apply([StartRequest(made, 1, pack_tokens(prompt), "first_token")])
    granted = BlocksGranted(made.id, 1, (BlockId(0), BlockId(1), BlockId(2)), 0)
    for rounds in (1, 2):
        batcher.plan(0.0)
        batcher.apply([granted])
        for _ in range(rounds):
            step = batcher.plan(0.0)
            batcher.commit(step, StepResult([arena.compute(part) for part in step.slices]))
        batcher.apply([PreemptRequest(made.id, 1)])
    report = batcher.take_report(now_s=0.0)
    assert report is not None
    (token,) = report.tokens
    assert [entry.token for entry in token.prompt_logprobs] == prompt[1:]
