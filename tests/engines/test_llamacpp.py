"""llama.cpp servers as mixed workers: the fake checks every token that Baton sends and returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.core.config import Config
from baton.core.engine_config import EnginesConfig, engine_of
from baton.core.types import Sampling
from baton.integrations.engines.port import Generation
from baton.integrations.llamacpp import LlamaCppServer
from tests.engines.fake_engine import answer_to, servers
from tests.engines.fake_llamacpp import FakeLlamaCpp
from tests.engines.fake_vllm import FakeVllm
from tests.engines.fleets import baton_over, finished, tokens_of

PROMPT = [100 + token % 90 for token in range(70)]
ANSWER = answer_to(PROMPT, 40)


@asynccontextmanager
async def started(*fakes: FakeLlamaCpp) -> AsyncIterator[list[str]]:
    """Run servers. Yields them as --engine-url takes them."""
    async with servers(*fakes):
        yield [f"llamacpp={fake.url}" for fake in fakes]


def test_answers_are_those_of_the_server_and_no_more_run_than_it_has_slots() -> None:
    async def run() -> None:
        fake = FakeLlamaCpp(slots=2)
        async with started(fake) as urls, baton_over(*urls) as baton:
            asked = [baton.ask([*PROMPT, number + 40], 30 + number) for number in range(8)]
            answers = await asyncio.gather(*asked)
            assert answers == [answer_to([*PROMPT, number + 40], 30 + number) for number in range(8)]
            baton.check()
        assert fake.streams_max == 2
        assert all(body["cache_prompt"] for body in fake.bodies)

    asyncio.run(run())


def test_a_stop_token_ends_the_answer_and_is_its_last_token() -> None:
    """Whether the server ends there itself, or goes on because it does not know the token."""

    async def run() -> None:
        stop = ANSWER[12]
        expected = ANSWER[: ANSWER.index(stop) + 1]
        for end_tokens in ((stop,), ()):
            async with started(FakeLlamaCpp(end_tokens=end_tokens)) as urls, baton_over(*urls) as baton:
                assert await baton.ask(PROMPT, 40, Sampling(temperature=0.0, stop_token_ids=(stop,))) == expected

    asyncio.run(run())


def test_a_token_that_ends_the_servers_turn_but_not_the_answer_is_followed_by_more() -> None:
    async def run() -> None:
        fake = FakeLlamaCpp(end_tokens=(ANSWER[5], ANSWER[20]))
        async with started(fake) as urls, baton_over(*urls) as baton:
            absent = Sampling(temperature=0.0, stop_token_ids=(7,))
            assert await baton.ask(PROMPT, 40, absent) == ANSWER
            assert len(fake.bodies) > 1, "it was asked to go on"
            ignoring = await baton.ask(PROMPT, 40, Sampling(temperature=0.0))
            assert not {ANSWER[5], ANSWER[20]} & {*ignoring}

    asyncio.run(run())


def test_a_least_number_of_tokens_comes_before_the_stop_token() -> None:
    """llama.cpp has no such parameter: the first part of the answer ignores the end of a turn."""

    async def run() -> None:
        first = ANSWER.index(ANSWER[12])
        least = Sampling(temperature=0.0, stop_token_ids=(ANSWER[12],), output_tokens_min=first + 3)
        fake = FakeLlamaCpp(end_tokens=(ANSWER[12],))
        async with started(fake) as urls, baton_over(*urls) as baton:
            answer = await baton.ask(PROMPT, 40, least)
        assert ANSWER[12] not in answer[: first + 3]
        assert len(answer) >= first + 3
        assert [(body["ignore_eos"], body["n_predict"]) for body in fake.bodies[:2]] == [
            (True, first + 3),
            (False, 40 - first - 3),
        ]
        assert fake.bodies[1]["prompt"] == [*PROMPT, *answer[: first + 3]]

    asyncio.run(run())


def test_a_killed_server_loses_no_token() -> None:
    """The other server, of another engine, gets the prompt and the answer so far."""

    async def run() -> None:
        killed, other = FakeLlamaCpp(free_tokens=9), FakeVllm()
        async with servers(other), started(killed) as urls, baton_over(*urls, other.url, joins=2) as baton:
            asked = [baton.submit([*PROMPT, number], 30) for number in range(40, 46)]
            await asyncio.gather(*(tokens_of(live, 1) for live in asked))
            assert killed.bodies, "the request of one of both is cut"
            await killed.stop()
            ends = await asyncio.gather(*(finished(live) for live in asked))
            assert {end.outcome for end in ends} == {"finished"}
            for number, live in zip(range(40, 46), asked, strict=True):
                assert live.tokens[71:] == answer_to([*PROMPT, number], 30)
            baton.check()

    asyncio.run(run())


def test_a_broken_stream_is_sent_again_with_the_tokens_so_far() -> None:
    async def run() -> None:
        fake = FakeLlamaCpp(break_after=10)
        async with started(fake) as urls, baton_over(*urls) as baton:
            assert await baton.ask(PROMPT, 40) == ANSWER
            assert [len(body["prompt"]) for body in fake.bodies[:2]] == [70, 80]

    asyncio.run(run())


def test_a_restart_of_an_older_version_is_not_noticed_between_two_checks() -> None:
    """Its properties have no text that each start changes. The server stays a worker."""

    async def run() -> None:
        fake = FakeLlamaCpp(has_marker=False)
        async with started(fake) as urls, baton_over(*urls) as baton:
            fake.started_s += 0.5
            for _ in range(3):
                fake.polled.clear()
                await fake.polled.wait()
            assert baton.fleet.joined == 1
            assert not any("restarted" in line for line in baton.told)

    asyncio.run(run())


def test_salted_requests_do_not_read_the_servers_prefix_cache() -> None:
    """The server has no salts, so that only requests without one may share."""

    async def run() -> None:
        fake = FakeLlamaCpp()
        async with started(fake) as (url,):
            server = LlamaCppServer(url.removeprefix("llamacpp="), "", answer_s=10)
            await server.facts()
            for salt in ("", "tenant"):
                asked = Generation(
                    id="g", tokens=PROMPT, output_tokens=0, tokens_max=4, sampling=Sampling(), cache_salt=salt
                )
                chosen = [token async for choice in server.stream(asked) for token in choice.token_ids or ()]
                assert chosen == ANSWER[:4]
            await server.close()
        assert [body["cache_prompt"] for body in fake.bodies] == [True, False]

    asyncio.run(run())


def test_llama_cpp_servers_take_no_single_role() -> None:
    made = EnginesConfig(servers=(engine_of("llamacpp=http://a:1"), engine_of("prefill=http://b:1")))
    assert any("servers of llama.cpp" in text for text in Config(engines=made).problems())
    assert engine_of("llamacpp=http://a:1").role == "mixed"
