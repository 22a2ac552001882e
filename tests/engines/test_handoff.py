"""1P1D over servers of another engine: one server computes the prompt, and the other one loads its KV."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.core.config import Config, Plugin, PolicyChoice, Topology
from baton.core.engine_config import EngineConfig, EnginesConfig, engine_of
from baton.core.errors import ConfigError
from baton.core.types import Role
from baton.decide.policy.policy_sets import policy_of
from tests.engines.fake_engine import FakeEngine, answer_to, servers
from tests.engines.fake_sglang import FakeSglang
from tests.engines.fake_vllm import FakeVllm
from tests.engines.fleets import baton_over, finished, tokens_of

PROMPT = [100 + token % 90 for token in range(70)]


def pair(engine: type[FakeEngine], **decode: int) -> tuple[FakeEngine, FakeEngine]:
    return one(engine, "p", "prefill"), one(engine, "d", "decode", **decode)


def one(engine: type[FakeEngine], name: str, role: Role, **fields: int) -> FakeEngine:
    mode = {"mode": role} if engine is FakeSglang else {}
    return engine(name=name, **mode, **fields)


def configs(prefill: FakeEngine, *decodes: FakeEngine) -> list[EngineConfig]:
    return [prefill.config("prefill"), *(decode.config("decode") for decode in decodes)]


@pytest.mark.parametrize("length", [33, 48, 49, 64, 65, 70])
def test_the_decode_server_loads_the_prompt_of_the_prefill_server(kv_engine: type[FakeEngine], length: int) -> None:
    """Lengths at and beside the edges of blocks."""

    async def run() -> None:
        prefill, decode = pair(kv_engine)
        async with servers(prefill, decode), baton_over(*configs(prefill, decode)) as baton:
            assert await baton.ask(PROMPT[:length], 20) == answer_to(PROMPT[:length], 20)
            baton.check()
            await prefill.emptied()
        assert decode.loaded_tokens in (length - 1, length)
        assert [len(fake.asked) for fake in (prefill, decode)] == [1, 1]
        assert [asked.tokens_max for asked in decode.asked] == [20]

    asyncio.run(run())


def test_a_handoff_is_logged_replayed_and_explained(
    kv_engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> str:
        prefill, decode = pair(kv_engine)
        log = str(tmp_path / "log")
        async with servers(prefill, decode), baton_over(*configs(prefill, decode), log=log) as baton:
            asked = [baton.ask([*PROMPT, number + 40], 20) for number in range(6)]
            assert await asyncio.gather(*asked) == [answer_to([*PROMPT, number + 40], 20) for number in range(6)]
            live = baton.submit(PROMPT, 5)
            await finished(live)
        assert decode.loaded_tokens in (7 * len(PROMPT) - 1, 7 * len(PROMPT) + 6)
        assert len(prefill.asked) == len(decode.asked) == 7
        return live.request.id

    request_id = asyncio.run(run())
    assert main(["replay", str(tmp_path / "log")]) == 0
    assert main(["explain", request_id, "--log", str(tmp_path / "log")]) == 0
    shown = capsys.readouterr().out
    assert "-0" in shown
    assert "-1" in shown


def test_a_killed_decode_server_loses_no_request(kv_engine: type[FakeEngine]) -> None:
    """The second decode server has no KV of it: the prompt and the answer so far are computed again."""

    async def run() -> None:
        (prefill, first), second = pair(kv_engine, free_tokens=4), one(kv_engine, "e", "decode", free_tokens=4)
        async with servers(prefill, first, second), baton_over(*configs(prefill, first, second)) as baton:
            live = baton.submit(PROMPT, 30)
            await tokens_of(live, 4)
            used, other = (first, second) if first.asked else (second, first)
            other.gate.set()
            await used.stop()
            assert (await finished(live)).outcome == "finished"
            assert live.tokens[len(PROMPT) :] == answer_to(PROMPT, 30)
            baton.check()

    asyncio.run(run())


def test_a_killed_prefill_server_loses_no_request(kv_engine: type[FakeEngine]) -> None:
    """Its prompts wait until a server can compute them."""

    async def run() -> None:
        prefill, decode = one(kv_engine, "p", "prefill", free_tokens=0), one(kv_engine, "d", "decode")
        async with servers(prefill, decode), baton_over(*configs(prefill, decode)) as baton:
            live = baton.submit(PROMPT, 10)
            await prefill.began.wait()
            await prefill.stop()
            await baton.joined(1)
            prefill.gate.set()
            await prefill.restart()
            assert (await finished(live)).outcome == "finished"
            assert live.tokens[len(PROMPT) :] == answer_to(PROMPT, 10)

    asyncio.run(run())


def test_parameters_that_a_server_refuses_are_not_used_twice() -> None:
    """The KV is gone: the decode server computes the prompt."""

    async def run() -> None:
        prefill, decode = FakeVllm(name="p"), FakeVllm(name="d")
        async with servers(prefill, decode), baton_over(*configs(prefill, decode)) as baton:
            prefill.forgets = True
            assert await baton.ask(PROMPT, 10) == answer_to(PROMPT, 10)
            assert ["kv_transfer_params" in body for body in decode.bodies] == [True, False]
            assert decode.loaded_tokens == 0

    asyncio.run(run())


def test_a_hundred_aborts_leave_no_block_and_no_stream(kv_engine: type[FakeEngine]) -> None:
    """Cancelled in turn before the prompt, during it, after the handoff and in mid-answer."""

    async def run() -> None:
        prefill, decode = pair(kv_engine, free_tokens=3)
        async with servers(prefill, decode), baton_over(*configs(prefill, decode)) as baton:
            for number in range(25):
                lives = [baton.submit([*PROMPT, number + 40, turn + 40], 20) for turn in range(4)]
                baton.parts.gateway.cancel(lives[0])
                await asyncio.sleep(0)
                baton.parts.gateway.cancel(lives[1])
                for tokens, live in ((1, lives[2]), (3, lives[3])):
                    await tokens_of(live, tokens)
                    baton.parts.gateway.cancel(live)
                assert [(await finished(live)).outcome for live in lives] == ["cancelled"] * 4
            decode.gate.set()
            assert await baton.ask(PROMPT, 20) == answer_to(PROMPT, 20)
            baton.check()
            await decode.emptied()
            if kv_engine is FakeSglang:  # vLLM keeps KV that no server takes until its own lease ends
                await prefill.emptied()

    asyncio.run(run())


def test_policies_that_servers_cannot_follow_are_refused() -> None:
    engines = EnginesConfig(servers=(engine_of("prefill=http://a:1"), engine_of("decode=http://b:1")))
    config = Config(engines=engines)
    chosen = policy_of(config, tenants=1)
    assert (chosen.first_token.use, chosen.streaming.use, chosen.roles.use) == (
        "first-token-by-decode",
        "when-done",
        "static-roles",
    )
    wrong = Config(engines=engines, policy=PolicyChoice(first_token=Plugin(use="first-token-by-prefill")))
    with pytest.raises(ConfigError, match="first-token-by-decode"):
        policy_of(wrong, tenants=1)
    assert "leave out" in Config(engines=engines, topology=Topology(mixed=1)).lacks()[0]


def test_urls_of_servers_are_checked() -> None:
    given = ("prefill=http://a:1", "prefill=ftp://b", "prefill=http://a:1")
    problems = EnginesConfig(servers=tuple(map(engine_of, given))).problems()
    assert problems == [
        "engines.servers: 'ftp://b' is no URL of a server: write http://HOST:PORT",
        "engines.servers has http://a:1 2 times",
        "engines.servers has prefill servers, but none that can decode: add --engine-url decode=URL",
    ]
