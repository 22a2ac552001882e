"""SGLang's own forms: its streams, its stops, and both legs of a pair, which it runs at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from baton.cli.main import build_parser
from baton.cli.serve import configuration
from baton.core.config import Config
from baton.core.engine_config import EnginesConfig, engine_of
from baton.core.types import HostId, RequestId, Sampling
from baton.decide.policy.policy_sets import policy_of
from baton.integrations.engines.handoffs import ComputedPrompt, Handoffs
from baton.integrations.engines.legs import OpenLeg
from baton.integrations.engines.port import Choice, EngineBrokenError, EngineRefusedError, Generation
from baton.integrations.sglang import Event, FinishReason, MetaInfo, SglangServer, StreamError, StreamOutput, read_load
from tests.engines.fake_engine import answer_to, servers
from tests.engines.fake_sglang import FakeSglang
from tests.engines.fleets import baton_over, finished, tokens_of

PROMPT = [100 + token % 90 for token in range(70)]
ANSWER = answer_to(PROMPT, 40)


def pair(**decode: int) -> tuple[FakeSglang, FakeSglang]:
    return FakeSglang(name="p", mode="prefill"), FakeSglang(name="d", mode="decode", **decode)


async def first_of(events: Iterable[asyncio.Event]) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


# ---- streams


def test_a_stream_of_new_tokens_only_is_read_as_well() -> None:
    """--incremental-streaming-output: events do not repeat the tokens before."""

    async def run() -> None:
        fake = FakeSglang(is_incremental=True)
        async with servers(fake), baton_over(fake.config()) as baton:
            assert await baton.ask(PROMPT, 40) == ANSWER

    asyncio.run(run())


def test_a_stream_that_hangs_breaks_once_the_server_is_lost() -> None:
    async def run() -> None:
        got: asyncio.Queue[Choice] = asyncio.Queue()

        async def read() -> None:
            async for choice in server.stream(generation):
                got.put_nowait(choice)

        fake = FakeSglang(free_tokens=1)
        async with servers(fake):
            server = SglangServer(fake.url, "", answer_s=10)
            generation = Generation(id="a", tokens=PROMPT, output_tokens=0, tokens_max=9, sampling=Sampling())
            reading = asyncio.create_task(read())
            assert (await got.get()).token_ids == ANSWER[:1]
            await server.disconnect()
            with pytest.raises(EngineBrokenError):
                await asyncio.wait_for(reading, 10)
            await server.close()

    asyncio.run(run())


def event(tokens: list[int], completion_tokens: int, reason: FinishReason | None = None) -> Event:
    return Event(output_ids=tokens, meta_info=MetaInfo(completion_tokens=completion_tokens, finish_reason=reason))


@pytest.mark.parametrize(
    ("events", "taken"),
    [
        ([event([5], 1), event([5, 6], 2)], [[5], [6]]),
        ([event([5], 1), event([6], 2)], [[5], [6]]),
        ([event([5, 6], 1), event([5, 6], 2)], [[5, 6], []]),
        ([event([5, 6], 2), event([], 2)], [[5, 6], []]),
    ],
    ids=["all tokens", "new tokens", "a token that arrived while the event was written", "a last event without tokens"],
)
def test_each_token_is_taken_once(events: list[Event], taken: list[list[int]]) -> None:
    output = StreamOutput(())
    assert [output.take(each) for each in events] == taken


def test_a_lost_event_breaks_the_stream() -> None:
    output = StreamOutput(())
    output.take(event([5], 1))
    with pytest.raises(EngineBrokenError, match="has 2 of 3 tokens"):
        output.take(event([7], 3))


@pytest.mark.parametrize(("status", "expected"), [(400, EngineRefusedError), (500, EngineBrokenError)])
def test_errors_within_a_stream_have_the_meaning_of_their_status(status: int, expected: type[Exception]) -> None:
    with pytest.raises(expected, match=f"{status}: too long"):
        StreamOutput(()).take(Event(error=StreamError(message="too long", code=status)))
    with pytest.raises(expected, match=f"{status}: too long"):
        StreamOutput(()).finish(FinishReason(type="abort", message="too long", status_code=status))


def test_a_token_that_ends_the_models_turn_but_not_the_answer_is_followed_by_more() -> None:
    """With stop tokens, SGLang stops at the model's own ones too."""

    async def run() -> None:
        fake = FakeSglang(end_tokens=(ANSWER[5],))
        async with servers(fake), baton_over(fake.config()) as baton:
            assert await baton.ask(PROMPT, 12, Sampling(temperature=0.0, stop_token_ids=(7,))) == ANSWER[:12]
            assert [len(asked.tokens) for asked in fake.asked[:2]] == [70, 76]

    asyncio.run(run())


def test_salted_requests_have_a_part_of_the_prefix_cache() -> None:
    async def run() -> None:
        fake = FakeSglang()
        async with servers(fake):
            server = SglangServer(fake.url, "", answer_s=10)
            asked = Generation(
                id="g", tokens=PROMPT, output_tokens=0, tokens_max=1, sampling=Sampling(seed=7), cache_salt="tenant"
            )
            choices = [choice async for choice in server.stream(asked)]
            assert choices == [Choice(token_ids=ANSWER[:1]), Choice(finish_reason="length")]
            await server.close()
        (body,) = fake.bodies
        assert (body["cache_salt"], body["extra_key"]) == ("tenant", "tenant")
        assert body["sampling_params"]["sampling_seed"] == 7

    asyncio.run(run())


def test_the_load_of_several_ranks_is_added_up() -> None:
    metrics = "".join(
        f'sglang:num_queue_reqs{{dp_rank="{rank}"}} 2.0\nsglang:token_usage{{dp_rank="{rank}"}} 0.25\n'
        f'sglang:num_decode_prealloc_queue_reqs{{dp_rank="{rank}"}} {rank}.0\n'
        for rank in range(2)
    )
    load = read_load(metrics)
    assert (load.waiting_requests, load.kv_used_ratio) == (5, 0.25)


# ---- joining


def test_a_server_with_another_role_or_without_metrics_may_not_join() -> None:
    async def run() -> None:
        other, silent = FakeSglang(mode="decode"), FakeSglang(has_metrics=False)
        async with servers(other, silent), baton_over(other.config(), silent.config(), joins=0) as baton:
            await baton.said("it was started for the role decode, but has the role mixed here: write decode=URL")
            await baton.said("start it with --enable-metrics: /metrics answered 404")

    asyncio.run(run())


def test_pairs_of_servers_are_checked() -> None:
    given = (engine_of("prefill=http://a:1", "sglang"), engine_of("decode=http://b:1", "sglang"))
    assert EnginesConfig(servers=given).problems() == []
    several = EnginesConfig(servers=(given[0], engine_of("decode=http://b:1"))).problems()
    assert "of several engines" in several[0]
    beside = EnginesConfig(servers=(*given, engine_of("http://c:1", "sglang"))).problems()
    assert "needs a partner" in beside[0]
    assert policy_of(Config(engines=EnginesConfig(servers=given)), tenants=1).streaming.use == "place-at-start"


def test_the_engine_of_urls_is_that_of_the_flag() -> None:
    urls = ("--engine-url", "prefill=http://a:1", "--engine-url", "decode=http://b:1")
    config = configuration(build_parser().parse_args(["serve", "hash", "--engine", "sglang", *urls]))
    assert [(server.engine, server.role) for server in config.engines.servers] == [
        ("sglang", "prefill"),
        ("sglang", "decode"),
    ]
    assert not config.problems() + config.lacks()


# ---- both legs


def test_both_legs_run_at_once_and_share_a_room() -> None:
    """The prefill server begins only once the decode server waits: a leg after the other would never end."""

    async def run() -> None:
        prefill, decode = pair()
        async with servers(prefill, decode), baton_over(prefill.config("prefill"), decode.config("decode")) as baton:
            asked = [baton.ask([*PROMPT, number], 20) for number in range(40, 46)]
            assert await asyncio.gather(*asked) == [answer_to([*PROMPT, number], 20) for number in range(40, 46)]
            baton.check()
        rooms = [body["bootstrap_room"] for body in prefill.bodies]
        assert len({*rooms}) == 6
        assert sorted(rooms) == sorted(body["bootstrap_room"] for body in decode.bodies)
        assert all(0 <= room < 2**63 for room in rooms)
        assert {body["bootstrap_port"] for body in decode.bodies} == {prefill.bootstrap_port}

    asyncio.run(run())


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_a_leg_that_dies_before_the_first_token_loses_no_request(lost: str) -> None:
    """Both servers have the prompt. The other leg is aborted, and both are sent again elsewhere."""

    async def run() -> None:
        fakes = [
            *(FakeSglang(name=f"p{number}", mode="prefill", free_tokens=0) for number in range(2)),
            *(FakeSglang(name=f"d{number}", mode="decode") for number in range(2)),
        ]
        async with servers(*fakes), baton_over(*(fake.config(fake.role) for fake in fakes)) as baton:
            live = baton.submit(PROMPT, 20)
            await first_of(fake.arrived for fake in fakes[:2])
            await first_of(fake.began for fake in fakes[2:])
            used = {fake.role: fake for fake in fakes if fake.asked}
            await used[lost].stop()
            await used["prefill" if lost == "decode" else "decode"].emptied()  # before it is sent again
            for fake in fakes:
                fake.gate.set()
            assert (await finished(live)).outcome == "finished"
            assert live.tokens[len(PROMPT) :] == ANSWER[:20]
            for fake in fakes:
                await fake.emptied()
            baton.check()

    asyncio.run(run())


def test_a_decode_server_that_hangs_before_the_first_token_loses_no_request() -> None:
    """As with a half-open connection: its leg does not break before the server is lost."""

    async def run() -> None:
        prefill, *decodes = pair()[0], *(FakeSglang(name=f"d{number}", mode="decode") for number in range(2))
        prefill.free_tokens = 0
        fakes = (prefill, *decodes)
        async with servers(*fakes), baton_over(*(fake.config(fake.role) for fake in fakes), silent_s=1.0) as baton:
            live = baton.submit(PROMPT, 20)
            await prefill.began.wait()
            await first_of(fake.arrived for fake in decodes)
            asked = [fake for fake in decodes if fake.asked]
            asked[0].is_silent = True
            await baton.said("is lost: it has not answered")
            prefill.gate.set()
            assert (await finished(live)).outcome == "finished"
            assert live.tokens[len(PROMPT) :] == ANSWER[:20]
            baton.check()

    asyncio.run(run())


def test_an_answer_that_no_worker_reads_is_aborted() -> None:
    """Its request has ended between both legs, or another decode server was chosen."""

    async def run() -> None:
        fake, other = FakeSglang(free_tokens=1), FakeSglang()
        async with servers(fake, other):
            made = [SglangServer(each.url, "", answer_s=10) for each in (fake, other)]
            handoffs, request_id = Handoffs(), RequestId("r")
            for ends in ("the request", "the choice"):
                asked = Generation(id=ends, tokens=PROMPT, output_tokens=0, tokens_max=9, sampling=Sampling())
                leg = OpenLeg(made[0], asked)
                await fake.began.wait()
                fake.began.clear()
                handoffs.keep(request_id, ComputedPrompt(HostId("h"), len(PROMPT), None, leg))
                if ends == "the request":
                    handoffs.drop_ended({request_id})
                    assert handoffs.has(request_id, HostId("h"))
                    handoffs.drop_ended(())
                else:
                    assert handoffs.take(request_id, len(PROMPT), made[1]) is None
                assert not handoffs.has(request_id, HostId("h"))
                await fake.emptied()
            for server in made:
                await server.close()
        assert fake.aborted == ["the request", "the choice"]

    asyncio.run(run())


def test_a_request_that_ends_while_its_answer_waits_for_blocks_is_aborted() -> None:
    """The decode server has its KV, but its worker no room for it."""

    async def run() -> None:
        prefill, decode = pair(blocks=8, free_tokens=3)
        async with servers(prefill, decode), baton_over(prefill.config("prefill"), decode.config("decode")) as baton:
            first = baton.submit(PROMPT, 20)
            await tokens_of(first, 3)
            second = baton.submit([*PROMPT[1:], 40], 20)
            while second.worker != "sglang-1":
                decode.polled.clear()
                await decode.polled.wait()
            baton.parts.gateway.cancel(second)
            assert (await finished(second)).outcome == "cancelled"
            while len(decode.unfinished) > 1:
                decode.changed.clear()
                await decode.changed.wait()
            decode.gate.set()
            assert (await finished(first)).outcome == "finished"
            assert decode.aborted == [decode.asked[1].id]
            baton.check()

    asyncio.run(run())


def test_a_broken_answer_of_a_healthy_pair_is_computed_again() -> None:
    """A decode server takes no prompt alone: both servers get the prompt and the answer so far."""

    async def run() -> None:
        prefill, decode = pair(break_after=5)
        async with servers(prefill, decode), baton_over(prefill.config("prefill"), decode.config("decode")) as baton:
            live = baton.submit(PROMPT, 12)
            await tokens_of(live, 5)
            decode.break_after = None
            assert (await finished(live)).outcome == "finished"
            assert live.tokens[len(PROMPT) :] == ANSWER[:12]
            assert [len(asked.tokens) for asked in prefill.asked] == [70, 75]
            assert [len(asked.tokens) for asked in decode.asked] == [70, 75]

    asyncio.run(run())


@pytest.mark.parametrize("broken", ["prefill", "decode"])
def test_a_server_that_fails_with_every_partner_is_lost(broken: str) -> None:
    """Its partners see the same failures, but answer with the other server of its role."""

    async def run() -> None:
        fakes = [FakeSglang(name=f"{mode}{number}", mode=mode) for mode in ("prefill", "decode") for number in range(2)]
        async with servers(*fakes), baton_over(*(fake.config(fake.role) for fake in fakes), silent_s=1.0) as baton:
            fake = next(each for each in fakes if each.mode == broken)
            fake.fail_posts = 1 << 30
            lives = [baton.submit([*PROMPT, number + 40], 4) for number in range(12)]
            await baton.said(f"{fake.url} is lost: 3 requests in a row have failed there")
            assert {(await finished(live)).outcome for live in lives} == {"failed", "finished"}
            assert [each for each in baton.told if " is lost" in each and fake.url not in each] == []
            fake.fail_posts = 0
            await baton.joined(4)
            assert await baton.ask(PROMPT, 4) == ANSWER[:4]
            baton.check()

    asyncio.run(run())


def test_no_server_is_lost_by_the_failures_of_the_only_partner() -> None:
    async def run() -> None:
        fakes = [*(FakeSglang(name=f"p{number}", mode="prefill") for number in range(2)), pair(fail_posts=1 << 30)[1]]
        decode = fakes[-1]
        async with servers(*fakes), baton_over(*(fake.config(fake.role) for fake in fakes)) as baton:
            lives = [baton.submit([*PROMPT, number + 40], 4) for number in range(8)]
            assert [(await finished(live)).outcome for live in lives] == ["failed"] * 8
            while not any(each.id.startswith("probe-") for each in decode.asked):
                decode.arrived.clear()
                await decode.arrived.wait()
            decode.fail_posts = 0
            assert await baton.ask(PROMPT, 4) == ANSWER[:4]
            assert not any("is lost" in line for line in baton.told)
            baton.check()

    asyncio.run(run())
