"""Servers that fail, hang, restart or refuse: no request is lost, and none is answered with wrong tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from baton.core.errors import ConfigError
from baton.core.http_config import HttpConfig
from baton.serve.live.live_request import LiveRequest
from tests.engines.fake_engine import FakeEngine, answer_to, servers
from tests.engines.fake_vllm import FakeVllm
from tests.engines.fleets import Baton, baton_over, finished, tokens_of

PROMPT = [36 + token % 90 for token in range(40)]
"""ASCII, so that it is a text as well."""


async def four_begun(baton: Baton) -> list[LiveRequest]:
    """Send four requests, and return them once each has 5 of its 20 tokens."""
    lives = [baton.submit([*PROMPT, number + 40], 20) for number in range(4)]
    for live in lives:
        await tokens_of(live, 5)
    return lives


async def check_answers(lives: Sequence[LiveRequest]) -> None:
    """Wait for the ends of such requests. None has failed, and each answer is that of a calm server."""
    assert [(await finished(live)).outcome for live in lives] == ["finished"] * 4
    assert [live.tokens[41:] for live in lives] == [answer_to([*PROMPT, n + 40], 20) for n in range(4)]


def test_requests_of_a_killed_server_continue_on_another_one(engine: type[FakeEngine]) -> None:
    """The other one gets the prompt and the answer so far."""

    async def run() -> None:
        fakes = [engine(free_tokens=5), engine(free_tokens=5)]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes)) as baton:
            lives = [baton.submit([*PROMPT, number + 40], 40) for number in range(6)]
            for live in lives:
                await tokens_of(live, 5)
            assert all(fake.bodies for fake in fakes), "one server has no request"
            fakes[1].gate.set()
            sent = len(fakes[1].bodies)
            await fakes[0].stop()
            ends = [await finished(live) for live in lives]
            assert [end.outcome for end in ends] == ["finished"] * 6
            answers = [live.tokens[len(PROMPT) + 1 :] for live in lives]
            assert answers == [answer_to([*PROMPT, number + 40], 40) for number in range(6)]
            assert {len(asked.tokens) for asked in fakes[1].asked[sent:]} == {len(PROMPT) + 1 + 5}
            baton.check()

    asyncio.run(run())


def test_a_restarted_server_joins_again_with_an_empty_cache(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = engine(free_tokens=5)
        async with servers(fake), baton_over(fake.config()) as baton:
            live = baton.submit(PROMPT, 30)
            await tokens_of(live, 5)
            await fake.stop()
            await baton.joined(0)
            fake.free_tokens = 30
            await fake.restart()
            assert (await finished(live)).outcome == "finished"
            assert live.tokens[len(PROMPT) :] == answer_to(PROMPT, 30)
            baton.check()

    asyncio.run(run())


def test_a_server_joins_again_while_the_key_file_is_invalid(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys in use stay: a wrong edit of the file must not cost a server."""

    def fail(_: HttpConfig) -> int:
        raise ConfigError("the key file is invalid")

    async def run() -> None:
        fake = engine()
        async with servers(fake), baton_over(fake.config()) as baton:
            await baton.joined(1)
            monkeypatch.setattr(HttpConfig, "tenants", fail)
            await fake.stop()
            await baton.joined(0)
            await fake.restart()
            async with asyncio.timeout(30):
                await baton.joined(1)
            await baton.ask(PROMPT, 4)
            baton.check()

    asyncio.run(run())


def test_a_restart_between_two_checks_is_noticed(engine: type[FakeEngine]) -> None:
    """Its pool must not count prefixes as cached that the new process does not have."""

    async def run() -> None:
        fake = engine()
        async with servers(fake), baton_over(fake.config()) as baton:
            await baton.ask(PROMPT, 4)
            fake.started_s += 0.5
            await baton.said("restarted")
            await baton.joined(1)
            assert next(iter(baton.parts.driver.pools.values())).view().blocks_cached == 0

    asyncio.run(run())


def test_a_server_that_hangs_is_lost_after_silent_s_and_its_requests_continue(engine: type[FakeEngine]) -> None:
    """As with a half-open connection: nothing arrives, and nothing breaks."""

    async def run() -> None:
        fakes = [engine(free_tokens=5), engine(free_tokens=5)]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes), silent_s=1.0) as baton:
            lives = await four_begun(baton)
            fakes[0].is_silent = True
            fakes[1].gate.set()
            await check_answers(lives)

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["a 500", "a 429", "a broken stream"])
def test_a_request_that_fails_on_a_healthy_server_is_sent_again(engine: type[FakeEngine], fault: str) -> None:
    async def run() -> None:
        failure = int(fault.removeprefix("a ")) if fault != "a broken stream" else None
        fake = engine(break_after=3) if failure is None else engine(fail_posts=1, failure=failure)
        async with servers(fake), baton_over(fake.config()) as baton:
            live = baton.submit(PROMPT, 12)
            await tokens_of(live, 3)
            fake.break_after = None
            assert (await finished(live)).outcome == "finished"
            assert live.tokens[len(PROMPT) :] == answer_to(PROMPT, 12)
            assert len(fake.bodies) >= 2
            baton.check()

    asyncio.run(run())


def test_a_request_that_keeps_failing_fails_alone(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = engine(fail_posts=3)
        async with servers(fake), baton_over(fake.config()) as baton:
            finish = await finished(baton.submit(PROMPT, 12))
            assert finish.outcome == "failed"
            assert "failed 3 times" in finish.message
            assert await baton.ask(PROMPT, 12) == answer_to(PROMPT, 12)
            baton.check()

    asyncio.run(run())


def test_no_request_fails_by_a_server_whose_engine_has_ended() -> None:
    """It still answers /metrics, and attracts requests because it has none."""

    async def run() -> None:
        fakes = [FakeVllm(), FakeVllm()]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes)) as baton:
            fakes[0].fail_posts, fakes[0].health = 1 << 30, 503
            for number in range(4):
                assert await baton.ask([*PROMPT, number + 40], 4) == answer_to([*PROMPT, number + 40], 4)
            await baton.said("is lost: /health answered 503")
            fakes[0].fail_posts, fakes[0].health = 0, 200
            await baton.joined(2)
            baton.check()

    asyncio.run(run())


def test_a_server_that_fails_every_request_is_lost_for_silent_s(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fakes = [engine(), engine()]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes), silent_s=1.0) as baton:
            fakes[0].fail_posts = 1 << 30
            lives = [baton.submit([*PROMPT, number + 40], 4) for number in range(8)]
            await baton.said(f"{fakes[0].url} is lost: 3 requests in a row have failed there")
            assert {(await finished(live)).outcome for live in lives} == {"failed", "finished"}
            fakes[0].fail_posts = 0
            await baton.joined(2)
            baton.check()

    asyncio.run(run())


def test_a_server_stays_if_the_failed_requests_were_at_fault(engine: type[FakeEngine]) -> None:
    """They may be hours old when another server joins."""

    async def run() -> None:
        fakes = [engine(), engine()]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes)) as baton:
            await fakes[1].stop()
            await baton.joined(1)
            fakes[0].fail_posts = 9
            lives = [baton.submit([*PROMPT, number + 40], 4) for number in range(3)]
            assert [(await finished(live)).outcome for live in lives] == ["failed"] * 3
            fakes[0].arrived.clear()
            await fakes[1].restart()
            await asyncio.wait_for(fakes[0].arrived.wait(), 30)
            await baton.joined(2)
            assert await baton.ask(PROMPT, 4) == answer_to(PROMPT, 4)
            assert not any("in a row" in line for line in baton.told)
            baton.check()

    asyncio.run(run())


def test_the_only_server_stays_when_it_fails_every_request(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = engine()
        async with servers(fake), baton_over(fake.config()) as baton:
            fake.fail_posts = 12
            lives = [baton.submit([*PROMPT, number + 40], 4) for number in range(4)]
            assert [(await finished(live)).outcome for live in lives] == ["failed"] * 4
            assert await baton.ask(PROMPT, 4) == answer_to(PROMPT, 4)
            assert not any("is lost" in line for line in baton.told)

    asyncio.run(run())


def test_requests_that_a_server_refuses_do_not_cost_it(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fakes = [engine(), engine()]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes)) as baton:
            for fake in fakes:
                fake.fail_posts, fake.failure = 1 << 30, 400
            ends = [await finished(baton.submit([*PROMPT, number + 40], 4)) for number in range(8)]
            assert {end.outcome for end in ends} == {"failed"}
            assert not any("is lost" in line for line in baton.told)

    asyncio.run(run())


def test_an_answer_in_another_form_fails_its_request_and_no_other(engine: type[FakeEngine]) -> None:
    """As by another version of the engine: no token is guessed."""

    async def run() -> None:
        fake = engine(speaks_otherwise=True)
        async with servers(fake), baton_over(fake.config()) as baton:
            finish = await finished(baton.submit(PROMPT, 12))
            assert finish.outcome == "failed"
            assert "an answer that is not understood" in finish.message
            fake.speaks_otherwise = False
            assert await baton.ask(PROMPT, 12) == answer_to(PROMPT, 12)
            baton.check()

    asyncio.run(run())


def test_metrics_that_stay_away_are_used_until_the_server_is_lost(kv_engine: type[FakeEngine]) -> None:
    """The last load counts for `silent_s`. Then requests continue elsewhere, and the server returns without load."""

    async def run() -> None:
        fakes = [kv_engine(free_tokens=5), kv_engine(free_tokens=5)]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes), silent_s=1.0) as baton:
            lives = await four_begun(baton)
            fakes[0].waiting = 9
            for _ in range(3):  # the second answer has the new load, and precedes the third question
                fakes[0].polled.clear()
                await fakes[0].polled.wait()
            fakes[0].hides_metrics = True
            fakes[0].polled.clear()
            await fakes[0].polled.wait()
            worker = baton.parts.gateway.cluster().workers[0]
            assert worker.waiting == 9
            fakes[1].gate.set()
            await check_answers(lives)
            assert any(f"{worker.id} at" in line and "has not answered for 1 s" in line for line in baton.told)
            fakes[0].waiting, fakes[0].hides_metrics = 0, False
            await baton.joined(2)
            assert [each.waiting for each in baton.parts.gateway.cluster().workers] == [0, 0]
            baton.check()

    asyncio.run(run())


def test_a_server_whose_load_cannot_be_read_is_lost_after_silent_s(engine: type[FakeEngine]) -> None:
    """Requests arrive and leave, but the route of the load hangs: the server could be stuck, so others go on."""

    async def run() -> None:
        fakes = [engine(free_tokens=5), engine(free_tokens=5)]
        async with servers(*fakes), baton_over(*(fake.config() for fake in fakes), silent_s=1.0) as baton:
            lives = await four_begun(baton)
            fakes[0].hides_metrics = True
            fakes[1].gate.set()
            await check_answers(lives)
            await baton.said("has not answered for 1 s")
            fakes[0].hides_metrics = False
            await baton.joined(2)
            baton.check()

    asyncio.run(run())


def test_a_request_that_the_server_refuses_fails_with_its_reason(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = engine()
        async with servers(fake), baton_over(fake.config()) as baton:
            fake.context_tokens = 30
            finish = await finished(baton.submit(PROMPT, 12))
            assert finish.outcome == "failed"
            assert "400: at most 30 tokens" in finish.message
            assert len(fake.bodies) == 1
            baton.check()

    asyncio.run(run())


def test_a_server_that_ends_too_early_does_not_shorten_an_answer(token_engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = token_engine(context_tokens=2048)
        async with servers(fake), baton_over(fake.config()) as baton:
            fake.ends_after = 4
            finish = await finished(baton.submit(PROMPT, 12))
            assert finish.outcome == "failed"
            assert "ended the answer after 4 tokens" in finish.message

    asyncio.run(run())


def test_a_key_is_sent_and_its_lack_is_told(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = engine(api_key="secret")
        async with servers(fake):
            async with baton_over(fake.config(), key="secret") as baton:
                assert await baton.ask(PROMPT, 5) == answer_to(PROMPT, 5)
            async with baton_over(fake.config(), joins=0) as baton:
                await baton.said("answered 401: Unauthorized")

    asyncio.run(run())


def test_a_server_with_another_tokenizer_may_not_join(engine: type[FakeEngine]) -> None:
    async def run() -> None:
        fake = engine(tokenizer=[1, 2, 3])
        async with servers(fake), baton_over(fake.config(), joins=0) as baton:
            await baton.said("its tokenizer is not that of hash")

    asyncio.run(run())
