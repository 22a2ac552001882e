"""Where a request's time went: the parts are in order, and they add up whatever happened on the way."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from baton.core.types import OutputToken, Request, RequestId, WorkerId
from baton.serve.live.live_request import UPDATE_TOKENS_MAX, Finish, LiveRequest, Stamps, Timings

P, D, E = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("decode-1")
REQUEST = Request(id=RequestId("r"), prompt_tokens=3, output_tokens_max=9, arrived_at_s=10.0)


def live() -> LiveRequest:
    return LiveRequest(REQUEST, [1, 2, 3])


def token(index: int, attempt: int = 1) -> OutputToken:
    return OutputToken(REQUEST.id, attempt, index, 50 + index)


def test_a_request_that_was_handed_off() -> None:
    stamps = Stamps(arrived_s=10.0)
    stamps.start(P, 11.0)
    stamps.token(P, 0, 13.0)
    stamps.sent(1, 13.5)
    stamps.token(D, 1, 16.0, step_s=2.0)
    stamps.token(D, 2, 17.0, step_s=1.0)
    stamps.sent(2, 17.5)
    assert stamps.timings(1) == Timings(
        queue_s=1.0,
        prefill_s=2.0,
        handoff_s=1.0,
        first_decode_s=3.0,
        ttft_s=3.5,
        tpot_s=2.0,
        e2e_s=7.5,
        prefill_worker=P,
        decode_worker=D,
    )


def test_a_first_token_that_was_left_to_decode() -> None:
    """Prefill ends with its prompt; what follows is the handoff, and decode's first token is the first of all."""
    stamps = Stamps(arrived_s=10.0)
    stamps.start(P, 11.0)
    stamps.leave(P, 13.0)
    stamps.start(D, 14.0)
    stamps.token(D, 0, 16.0, step_s=2.0)
    stamps.sent(1, 16.5)
    stamps.token(D, 1, 17.0)
    stamps.sent(1, 17.5)
    assert stamps.timings(1) == Timings(
        queue_s=1.0,
        prefill_s=2.0,
        handoff_s=1.0,
        first_decode_s=3.0,
        ttft_s=6.5,
        tpot_s=1.0,
        e2e_s=7.5,
        prefill_worker=P,
        decode_worker=D,
    )


def test_a_prompt_that_was_all_there_is_left_without_a_step() -> None:
    """Prefill never computed a part of it, and has still handed it over."""
    stamps = Stamps(arrived_s=10.0)
    stamps.leave(P, 11.0)
    stamps.leave(D, 12.0)
    stamps.start(D, 13.0)
    stamps.token(D, 0, 14.0, step_s=1.0)
    timings = stamps.timings(1)
    assert (timings.queue_s, timings.prefill_s, timings.handoff_s) == (3.0, 0.0, 2.0)
    assert (timings.prefill_worker, timings.decode_worker) == (P, D)


def test_one_mixed_worker_has_both_legs_and_no_handoff() -> None:
    stamps = Stamps(arrived_s=0.0)
    stamps.start(P, 1.0)
    stamps.token(P, 0, 2.0)
    stamps.token(P, 1, 3.0)
    timings = stamps.timings(1)
    assert (timings.prefill_worker, timings.decode_worker, timings.handoff_s) == (P, P, None)


def test_a_worker_that_does_both_legs_hands_nothing_off() -> None:
    """It began the request once, and again after the first token: its own queue, no handoff."""
    stamps = Stamps(arrived_s=0.0)
    stamps.start(P, 1.0)
    stamps.token(P, 0, 2.0)
    stamps.token(P, 1, 6.0, step_s=1.0)
    assert stamps.timings(1).handoff_s is None
    assert stamps.decode_worker == P


def test_one_token_has_no_pace() -> None:
    stamps = Stamps(arrived_s=0.0)
    stamps.start(P, 1.0)
    stamps.token(P, 0, 2.0)
    stamps.sent(1, 2.0)
    timings = stamps.timings(1)
    assert (timings.tpot_s, timings.first_decode_s, timings.decode_worker) == (None, None, None)


def test_a_worker_that_died_before_the_first_token_is_not_the_one_that_is_named() -> None:
    """The queue ends with its first slice; prefill lasts until there is a token, whoever found it."""
    stamps = Stamps(arrived_s=0.0)
    stamps.start(P, 1.0)
    stamps.start(E, 4.0)
    stamps.token(E, 0, 6.0)
    timings = stamps.timings(2)
    assert (timings.queue_s, timings.prefill_s, timings.handoff_s) == (1.0, 5.0, None)
    assert (timings.prefill_worker, timings.attempts) == (E, 2)


def test_a_failover_while_decoding_does_not_lengthen_the_handoff() -> None:
    stamps = Stamps(arrived_s=0.0)
    stamps.start(P, 1.0)
    stamps.token(P, 0, 2.0)
    stamps.token(D, 1, 4.0, step_s=1.0)
    stamps.token(E, 2, 10.0, step_s=1.0)
    timings = stamps.timings(2)
    assert (timings.handoff_s, timings.first_decode_s, timings.decode_worker) == (1.0, 2.0, E)


def test_nothing_has_happened_yet() -> None:
    assert Stamps(arrived_s=5.0).timings(1) == Timings()


steps_s = st.lists(st.tuples(st.sampled_from([P, D, E]), st.floats(0, 2), st.booleans()), min_size=1, max_size=12)


@given(waits_s=st.floats(0, 5), steps=steps_s)
def test_the_parts_are_in_order_and_add_up(waits_s: float, steps: list[tuple[WorkerId, float, bool]]) -> None:
    """INV-5: arrival <= prefill <= first token <= sent, with any worker taking over between any two tokens."""
    moment_s = 100.0 + waits_s
    stamps, worker, index = Stamps(arrived_s=100.0), None, 0
    for next_worker, step_s, dies in steps:
        if next_worker != worker:
            stamps.start(next_worker, moment_s)
            worker = next_worker
        moment_s += step_s
        if dies:
            continue
        stamps.token(worker, index, moment_s)
        stamps.sent(1, moment_s)
        index += 1
    timings = stamps.timings(1)
    known = [timings.queue_s, timings.prefill_s, timings.handoff_s, timings.first_decode_s, timings.ttft_s]
    assert all(value >= 0.0 for value in known if value is not None)
    assert timings.queue_s is not None
    assert abs(timings.queue_s - waits_s) < 1e-9
    if index == 0:
        assert (timings.prefill_s, timings.ttft_s, timings.e2e_s) == (None, None, None)
        return
    assert timings.prefill_s is not None
    assert timings.ttft_s is not None
    assert timings.e2e_s is not None
    assert abs(timings.queue_s + timings.prefill_s - timings.ttft_s) < 1e-9
    assert timings.ttft_s <= timings.e2e_s
    assert (timings.tpot_s is None) == (index == 1)
    if timings.tpot_s is not None:
        assert abs(timings.tpot_s * (index - 1) - (timings.e2e_s - timings.ttft_s)) < 1e-9
        assert timings.decode_worker is not None


def test_only_the_next_token_of_the_present_attempt_is_taken() -> None:
    """A token that is repeated, skipped or of an attempt that was given up never reaches the client."""
    made = live()
    made.attempt = 2
    assert not made.push(token(0, attempt=1), P, 11.0)
    assert not made.push(token(1, attempt=2), P, 11.0)
    assert made.push(token(0, attempt=2), P, 11.0)
    assert not made.push(token(0, attempt=2), P, 12.0)
    assert made.push(token(1, attempt=2), P, 12.0)
    assert made.tokens == [1, 2, 3, 50, 51]
    assert made.stamps.prefilled_s == 11.0


def test_a_slow_reader_gets_everything_in_one_update_and_a_waiting_one_is_woken() -> None:
    async def read() -> None:
        made = live()
        made.push(token(0), P, 11.0)
        made.push(token(1), D, 12.0)
        update = await made.next()
        assert ([entry.index for entry in update.tokens], update.finish) == ([0, 1], None)
        waiting = asyncio.ensure_future(made.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        made.push(token(2), D, 13.0)
        made.push(token(3), D, 13.0)
        assert [entry.index for entry in (await waiting).tokens] == [2, 3]

    asyncio.run(read())


def test_the_end_comes_with_the_last_tokens_or_alone() -> None:
    async def read() -> None:
        together = live()
        together.push(token(0), P, 11.0)
        together.close(Finish(outcome="finished", reason="length"))
        update = await together.next()
        assert len(update.tokens) == 1
        assert update.finish == Finish(outcome="finished", reason="length")
        alone = live()
        waiting = asyncio.ensure_future(alone.next())
        await asyncio.sleep(0)
        alone.close(Finish(outcome="failed"))
        assert (await waiting).tokens == ()

    asyncio.run(read())


def test_a_reader_that_is_behind_lets_other_tasks_run() -> None:
    """All tokens at once would delay the streams of other clients while they are encoded."""

    async def story() -> None:
        request, turns = live(), 0
        for index in range(2 * UPDATE_TOKENS_MAX + 1):
            request.push(token(index), D, 11.0)
        request.close(Finish(outcome="finished", reason="length"))

        async def run_beside() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(run_beside())
        updates = [await request.next() for _ in range(3)]
        beside.cancel()
        assert [len(update.tokens) for update in updates] == [UPDATE_TOKENS_MAX, UPDATE_TOKENS_MAX, 1]
        assert [update.finish is None for update in updates] == [True, True, False]
        assert turns == 2

    asyncio.run(story())
