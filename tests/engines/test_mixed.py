"""Servers of other engines as mixed workers: the fakes check every token that Baton sends and returns."""

from __future__ import annotations

import asyncio
from pathlib import Path

from baton.cli.main import main
from baton.core.types import Sampling
from tests.engines.fake_engine import FakeEngine, answer_to, servers
from tests.engines.fake_vllm import FakeVllm
from tests.engines.fleets import baton_over, finished, tokens_of

PROMPT = [36 + token % 90 for token in range(70)]
"""ASCII, so that it is a text as well."""


def test_answers_are_those_of_the_server(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = engine()
        async with servers(fake), baton_over(fake.config()) as baton:
            asked = [baton.ask([*PROMPT, number + 40], 30 + number) for number in range(8)]
            answers = await asyncio.gather(*asked)
            assert answers == [answer_to([*PROMPT, number + 40], 30 + number) for number in range(8)]
            baton.check()
        assert not fake.aborted
        assert fake.closed == 0

    asyncio.run(run())


def test_a_stop_token_ends_the_answer_and_is_its_last_token(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake, stop = engine(), answer_to(PROMPT, 20)[12]
        async with servers(fake), baton_over(fake.config()) as baton:
            ended = await baton.ask(PROMPT, 20, Sampling(temperature=0.0, stop_token_ids=(stop,)))
            assert ended == answer_to(PROMPT, 20)[: answer_to(PROMPT, 20).index(stop) + 1]

    asyncio.run(run())


def test_a_server_without_the_token_interface_takes_token_ids_as_completions() -> None:
    async def run() -> None:
        fake = FakeVllm(has_generate=False)
        async with servers(fake), baton_over(fake.url) as baton:
            assert await baton.ask(PROMPT, 25) == answer_to(PROMPT, 25)
            assert "/v1/completions" in baton.told[-1]
        assert fake.bodies[0]["return_token_ids"] is True

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_request_on_the_server(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = engine(free_tokens=5)
        async with servers(fake), baton_over(fake.config()) as baton:
            live = baton.submit(PROMPT, 100)
            await tokens_of(live, 5)
            baton.parts.gateway.cancel(live)
            assert (await finished(live)).outcome == "cancelled"
            await fake.left.wait()
            assert fake.aborted == ([fake.asked[0].id] if fake.takes_aborts else [])
            baton.check()

    asyncio.run(run())


def test_a_prompt_goes_to_the_server_that_has_its_prefix(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fakes = [engine(), engine()]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes)) as baton:
            await baton.ask(PROMPT, 4)
            first = next(fake for fake in fakes if fake.bodies)
            for number in range(6):
                await baton.ask([*PROMPT, 50 + number], 4)
            assert len(first.bodies) == 7

    asyncio.run(run())


def test_more_answers_than_the_cache_holds_are_preempted_and_lose_no_token(pooled_engine: type[FakeEngine]) -> None:
    """The pool mirrors the server's 24 blocks, and eight answers of 16 blocks each want more."""

    async def run() -> None:
        fake = pooled_engine(blocks=24)
        async with servers(fake), baton_over(fake.config()) as baton:
            prompts = [[*PROMPT[:30], number + 40] for number in range(8)]
            answers = await asyncio.gather(*(baton.ask(prompt, 220) for prompt in prompts))
            assert answers == [answer_to(prompt, 220) for prompt in prompts]
            baton.check()
        assert any(len(asked.tokens) > 31 for asked in fake.asked), "no answer was continued"

    asyncio.run(run())


def test_requests_are_as_long_as_every_server_takes(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fakes = [engine(context_tokens=tokens) for tokens in (900, 700, 800)]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes)) as baton:
            assert baton.parts.gateway.request_tokens_max == 700

    asyncio.run(run())


def test_a_server_that_does_not_end_an_answer_is_cut_off(engine: type[FakeEngine]) -> None:
    """As by other stop tokens: Baton closes the connection once it has what it asked for."""

    async def run() -> None:
        fake = engine(more_tokens=1 << 20)
        async with servers(fake), baton_over(fake.config()) as baton:
            assert await baton.ask(PROMPT, 12) == answer_to(PROMPT, 12)
            await fake.hung_up.wait()

    asyncio.run(run())


def test_the_servers_own_load_is_seen_by_routing(kv_engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = kv_engine()
        async with servers(fake), baton_over(fake.config()) as baton:
            fake.waiting = 9
            for _ in range(3):  # the second answer has the new load, and precedes the third question
                fake.polled.clear()
                await fake.polled.wait()
            assert baton.parts.gateway.cluster().workers[0].waiting == 9

    asyncio.run(run())


def test_the_log_of_such_a_fleet_is_replayed(engine: type[FakeEngine], tmp_path: Path) -> None:
    async def run() -> None:
        fakes = [engine(), engine()]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes), log=str(tmp_path / "log")) as baton:
            await asyncio.gather(*(baton.ask([*PROMPT, number + 40], 30) for number in range(6)))

    asyncio.run(run())
    assert main(["replay", str(tmp_path / "log")]) == 0
