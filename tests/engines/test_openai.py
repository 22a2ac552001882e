"""Servers with OpenAI's completions as mixed workers: what Baton finds out about them, and the answers in text."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from baton.cli import serve
from baton.cli.main import build_parser
from baton.compute.hash_engine import hash_card
from baton.compute.models.tokenizer import StreamDecoder, load_tokenizer
from baton.core.config import Config
from baton.core.engine_config import EnginesConfig, engine_of
from baton.core.errors import ConfigError
from baton.core.types import Sampling
from baton.integrations.engines.port import EngineRefusedError, Generation
from baton.integrations.openai import OpenAiServer, tokens_of_piece
from tests.engines.fake_engine import answer_to, servers
from tests.engines.fake_openai import STANDARD, FakeOpenAi, FakeOpenAiText
from tests.engines.fleets import GREEDY, baton_over, finished
from tests.serving import NO_TLS, serving

PROMPT = [36 + token % 90 for token in range(70)]
ANSWER = answer_to(PROMPT, 40)


@pytest.mark.parametrize(
    ("fake", "form"),
    [
        (FakeOpenAi(), "token ids by"),
        (FakeOpenAi(is_strict=True), "token ids, answers in text by"),
        (FakeOpenAiText(), "text by"),
        (FakeOpenAiText(is_strict=True), "text by"),
    ],
)
def test_the_form_of_requests_is_found_out(fake: FakeOpenAi, form: str) -> None:
    async def run() -> None:
        async with servers(fake), baton_over(fake.config()) as baton:
            assert form in baton.told[-1]
            assert await baton.ask(PROMPT, 40, Sampling(temperature=0.0, stop_token_ids=(0,))) == ANSWER
            baton.check()
        assert not fake.is_strict or {*fake.bodies[0]} <= STANDARD

    asyncio.run(run())


@pytest.mark.parametrize("counted_more", [0, 1])
def test_a_first_token_that_the_server_adds_is_not_sent_twice(counted_more: int) -> None:
    async def run() -> None:
        fake, bos = FakeOpenAiText(counted_more=counted_more), 1
        async with servers(fake), baton_over(fake.config()) as baton:
            await baton.ask([bos, *PROMPT], 4)
        assert fake.bodies[0]["prompt"].startswith("<bos>") == (not counted_more)

    asyncio.run(run())


def test_the_servers_end_of_turn_ends_the_answer_with_a_stop_token() -> None:
    """The text of the stop token is not in the answer. Baton ends the answer with one that the client asked for."""

    async def run() -> None:
        fake, stop = FakeOpenAiText(end_tokens=(ANSWER[12],)), 0
        first = ANSWER.index(ANSWER[12])
        async with servers(fake), baton_over(fake.config()) as baton:
            ended = Sampling(temperature=0.0, stop_token_ids=(stop,))
            assert await baton.ask(PROMPT, 40, ended) == [*ANSWER[:first], stop]
            assert fake.asked[0].tokens_max == 40

    asyncio.run(run())


def test_a_server_that_ends_although_it_should_go_on_fails_the_request() -> None:
    """As a server does that ignores `min_tokens`."""

    async def run() -> None:
        fake = FakeOpenAiText(end_tokens=(ANSWER[0],), ignores_others=True)
        async with servers(fake), baton_over(fake.config()) as baton:
            least = Sampling(temperature=0.0, stop_token_ids=(0,), output_tokens_min=5)
            finish = await finished(baton.submit(PROMPT, 12, least))
            assert finish.outcome == "failed"
            assert "ended the answer (stop) after 0 tokens" in finish.message
            baton.check()

    asyncio.run(run())


def test_a_text_that_has_fewer_tokens_here_than_there_is_continued() -> None:
    """The server ends each answer after 15 tokens, as one would whose tokens are shorter."""

    async def run() -> None:
        fake = FakeOpenAiText(ends_after=15)
        async with servers(fake), baton_over(fake.config()) as baton:
            assert await baton.ask(PROMPT, 40) == ANSWER
        assert [asked.tokens_max for asked in fake.asked] == [40, 25, 10]

    asyncio.run(run())


def test_metrics_that_fail_once_are_no_restart() -> None:
    async def run() -> None:
        fake = FakeOpenAi()
        async with servers(fake), baton_over(fake.config()) as baton:
            fake.fail_metrics = 2
            for _ in range(4):
                fake.polled.clear()
                await fake.polled.wait()
            assert not fake.fail_metrics
            assert baton.fleet.joined == 1
            assert not any("is lost" in line for line in baton.told)

    asyncio.run(run())


def test_a_tokenizer_that_takes_other_fields_is_no_obstacle() -> None:
    """A server that finds no text in the request returns no token."""

    async def run() -> None:
        fake = FakeOpenAi(tokenizer=[])
        async with servers(fake), baton_over(fake.config()) as baton:
            assert await baton.ask(PROMPT, 12) == ANSWER[:12]

    asyncio.run(run())


def test_servers_that_cannot_be_used_are_told() -> None:
    async def run() -> None:
        foreign, chat_only = FakeOpenAiText(counted_more=3), FakeOpenAi(has_completions=False)
        given = (foreign, chat_only)
        async with servers(*given), baton_over(*(fake.config() for fake in given), joins=0) as baton:
            await baton.said("its tokenizer is not the model's")
            await baton.said("it does not complete a text: /v1/completions answered 404")
            await baton.said("/v1/chat/completions alone is not enough, see docs/integrations/openai.md")
            assert baton.fleet.joined == 0

    asyncio.run(run())


@pytest.mark.parametrize("kind", [FakeOpenAi, FakeOpenAiText])
def test_salts_are_sent_to_servers_that_know_them(kind: type[FakeOpenAi]) -> None:
    async def run() -> None:
        fake = kind()
        async with servers(fake):
            server = OpenAiServer(fake.config(), "", load_tokenizer(hash_card()), answer_s=10)
            await server.facts()
            asked = Generation(
                id="g", tokens=PROMPT, output_tokens=0, tokens_max=4, sampling=GREEDY, cache_salt="tenant"
            )
            chosen = [token async for choice in server.stream(asked) for token in choice.token_ids or ()]
            assert chosen == ANSWER[:4]
            await server.close()
        assert fake.bodies[0].get("cache_salt", "") == ("tenant" if fake.takes_ids else "")

    asyncio.run(run())


class SpacedTokenizer:
    """A vocabulary of bytes that puts a space before the first word of a text, as SentencePiece does."""

    space_prefix = True
    vocab_tokens = 256
    token_chars_max = None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [*b" ", *text.encode()] if text else []

    def decode(self, tokens: list[int], *, skip_special: bool = True) -> str:
        return bytes(tokens).decode().removeprefix(" ")

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,))

    def token_text(self, token: int) -> str:
        return chr(token)

    def is_special(self, token: int) -> bool:
        return False


@pytest.mark.parametrize("piece", [" word", "word", "\n", "ö€😀", "0"])
def test_pieces_of_a_text_are_that_text_again(piece: str) -> None:
    for tokenizer in (load_tokenizer(hash_card()), SpacedTokenizer()):
        stream = StreamDecoder(tokenizer, follows_text=True)
        assert "".join(map(stream.push, tokens_of_piece(tokenizer, piece))) == piece


def test_a_text_that_has_no_tokens_is_an_error() -> None:
    """Special tokens of the vocabulary are no text, so that Baton would leave them out."""

    class Special(SpacedTokenizer):
        def is_special(self, token: int) -> bool:
            return token == ord("<")

    with pytest.raises(EngineRefusedError, match="cannot be written in tokens"):
        tokens_of_piece(Special(), "a<b")


def test_a_server_of_baton_serves_another_one() -> None:
    """Texts and usage are those of the server itself, also where the answer ends at a stop token."""
    body = {"prompt": "hello again", "max_tokens": 60, "temperature": 0}
    with serving("hash", "--mixed", "1") as below:
        with serving("hash", "--engine", "openai", "--engine-url", f"{below.url}/v1") as server:
            answers = [
                httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=NO_TLS).raise_for_status().json()
                for url in (below.url, server.url)
            ]
        expected, found = ((answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) for answer in answers)
        assert found == expected


def test_the_configuration_is_checked() -> None:
    def problems(*urls: str) -> str:
        return "\n".join(Config(engines=EnginesConfig(servers=tuple(map(engine_of, urls)))).problems())

    assert not problems("openai=http://a:1/v1", "llamacpp=http://b:1", "http://c:1")
    assert "servers of OpenAI's API, which cannot hand off KV" in problems("openai=http://a:1", "prefill=http://b:1")
    assert "is no URL" in problems("http://a:1/v1")
    with pytest.raises(ConfigError, match="--engine openai starts no server"):
        serve.configuration(build_parser().parse_args(["serve", "hash", "--engine", "openai"]))
