"""Work on bodies: small ones on the event loop, larger ones in threads, large ones one at a time, client by client."""

from __future__ import annotations

import asyncio
import threading

from baton.core.limits import LimitsConfig
from baton.serve.http.body_threads import BodyThreads, ReceivedBody, Turns
from baton.serve.http.budgets import Budgets
from baton.serve.http.identity import NO_LIMITS


def body(size: int, client: int = 1) -> ReceivedBody:
    return ReceivedBody(b"x" * size, client)


def test_large_bodies_take_turns_beside_the_event_loop() -> None:
    """The event loop starts others while the first one is blocked. None begins before its end, unless it is smaller."""

    async def run() -> list[str]:
        threads = BodyThreads(inline_bytes_max=10, parallel_bytes_max=100)
        begun, released = threading.Event(), threading.Event()
        order: list[str] = []

        def blocked() -> None:
            begun.set()
            released.wait()
            order.append("first")

        first = asyncio.create_task(threads.run(blocked, body(101)))
        await asyncio.to_thread(begun.wait)
        asked = [("second", 1), ("third", 1), ("another client", 2)]
        later = [
            asyncio.create_task(threads.run(lambda name=name: order.append(name), body(101, n))) for name, n in asked
        ]
        await threads.run(lambda: order.append("smaller"), body(100))
        released.set()
        await asyncio.gather(first, *later)
        return order

    assert asyncio.run(run()) == ["smaller", "first", "second", "another client", "third"]


def test_small_bodies_need_no_thread_unless_the_work_may_block() -> None:
    async def run() -> list[bool]:
        threads, own = BodyThreads(inline_bytes_max=10, parallel_bytes_max=100), threading.current_thread()

        async def is_own(size: int, *, may_block: bool = False) -> bool:
            return await threads.run(threading.current_thread, body(size), may_block=may_block) is own

        return [await is_own(10), await is_own(11), await is_own(10, may_block=True)]

    assert asyncio.run(run()) == [True, False, False]


def test_requests_begin_one_by_one_in_rounds_of_the_event_loop() -> None:
    """One client sends four requests at once, then another sends one. A callback counts the rounds."""

    async def run() -> tuple[list[str], list[int]]:
        budgets, loop = Budgets(LimitsConfig()), asyncio.get_running_loop()
        order: list[str] = []
        rounds: list[int] = []
        count = 0

        def next_round() -> None:
            nonlocal count
            count += 1
            loop.call_soon(next_round)

        async def begin(client: str, name: str) -> None:
            await budgets.begin(client, NO_LIMITS, is_counted=False, now_s=0.0).take_turn()
            order.append(name)
            rounds.append(count)

        next_round()
        names = [("me", "a"), ("me", "b"), ("me", "c"), ("me", "d"), ("you", "other")]
        await asyncio.gather(*(begin(client, name) for client, name in names))
        return order, rounds

    order, rounds = asyncio.run(run())
    assert order == ["a", "b", "other", "c", "d"]
    assert len({*rounds}) == len(rounds), rounds


def test_a_cancelled_request_loses_its_turn_to_the_next() -> None:
    """Whether it is cancelled before it gets its turn, or in the round in which it gets it."""

    async def run(*, has_turn: bool) -> None:
        turns = Turns()
        await turns.take(1)
        cancelled, waiting = (asyncio.create_task(turns.take(1)) for _ in range(2))
        await asyncio.sleep(0)
        if has_turn:
            turns.pass_on()
            cancelled.cancel()
        else:
            cancelled.cancel()
            turns.pass_on()
        await waiting
        turns.pass_on()
        await turns.take(1)

    for has_turn in (True, False):
        asyncio.run(run(has_turn=has_turn))
