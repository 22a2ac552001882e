"""Work on bodies: small ones on the event loop, larger ones in threads, and large ones one at a time."""

from __future__ import annotations

import asyncio
import threading

from baton.serve.http.body_threads import BodyThreads


def test_large_bodies_take_turns_beside_the_event_loop() -> None:
    """The event loop starts the second one while the first one is blocked, and it does not begin before its end."""

    async def run() -> list[str]:
        threads = BodyThreads(inline_bytes_max=10, parallel_bytes_max=100)
        begun, released = threading.Event(), threading.Event()
        order: list[str] = []

        def blocked() -> None:
            begun.set()
            released.wait()
            order.append("first")

        first = asyncio.create_task(threads.run(blocked, size=101))
        await asyncio.to_thread(begun.wait)
        second = asyncio.create_task(threads.run(lambda: order.append("second"), size=101))
        await threads.run(lambda: order.append("smaller"), size=100)
        released.set()
        await asyncio.gather(first, second)
        return order

    assert asyncio.run(run()) == ["smaller", "first", "second"]


def test_small_bodies_need_no_thread_unless_the_work_may_block() -> None:
    async def run() -> list[bool]:
        threads, own = BodyThreads(inline_bytes_max=10, parallel_bytes_max=100), threading.current_thread()

        async def is_own(size: int, *, may_block: bool = False) -> bool:
            return await threads.run(threading.current_thread, size=size, may_block=may_block) is own

        return [await is_own(10), await is_own(11), await is_own(10, may_block=True)]

    assert asyncio.run(run()) == [True, False, False]
