"""The official client works against us as it does against OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import openai
import pytest

from baton.serve.http.identity import KeySources


@pytest.fixture(params=["server", "hash_server"])
def url(request: pytest.FixtureRequest) -> str:
    """Once over one engine in this process, once over a prefill and a decode worker."""
    return f"{request.getfixturevalue(request.param).url}/v1"


@pytest.fixture
def oai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def test_models_are_listed(oai: openai.OpenAI) -> None:
    assert [model.id for model in oai.models.list()] == ["hash"]
    assert oai.models.retrieve("hash").owned_by == "baton"


def test_a_chat_goes_over_several_turns(oai: openai.OpenAI) -> None:
    """The answer's message object goes back as it came."""
    messages = [{"role": "user", "content": "hi"}]
    first = oai.chat.completions.create(model="hash", messages=messages, temperature=0)
    assert first.choices[0].finish_reason == "stop"
    again = oai.chat.completions.create(
        model="hash",
        messages=[*messages, first.choices[0].message, {"role": "user", "content": "and?"}],
        max_completion_tokens=5,
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens > first.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens >= 0
    assert again.model_extra["timings"]["attempts"] == 1


def test_a_chat_streams(oai: openai.OpenAI) -> None:
    fields = {"model": "hash", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    whole = oai.chat.completions.create(**fields)
    chunks = list(oai.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].model_extra["timings"]["ttft_s"] > 0


def test_logprobs_come_as_objects(oai: openai.OpenAI) -> None:
    answer = oai.chat.completions.create(
        model="hash", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, max_tokens=3, seed=1
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert {len(entry.top_logprobs) for entry in entries} == {2}


def test_completions_of_many_prompts(oai: openai.OpenAI) -> None:
    answer = oai.completions.create(model="hash", prompt=["a", "b"], n=2, max_tokens=3, logprobs=1, echo=True)
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]
    streamed = oai.completions.create(model="hash", prompt="a", max_tokens=3, stream=True, extra_body={"top_k": 3})
    assert streamed.response.headers["content-type"].startswith("text/event-stream")
    assert [chunk.choices[0].finish_reason for chunk in streamed][-1] in ("length", "stop")


def test_errors_come_as_their_exceptions(oai: openai.OpenAI, build: Callable, serve: Callable) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be") as bad:
        oai.completions.create(model="hash", prompt="a", temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        oai.completions.create(model="gpt-9", prompt="a")
    locked = serve(build(keys=KeySources(api_keys=("secret",))))
    with openai.OpenAI(base_url=f"{locked.base_url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="secret").models.list().data[0].id == "hash"


def test_the_async_client_runs_many_streams_at_once(url: str) -> None:
    """32 streams, each in its own order, none mixed up: seeded text is what the same request gives alone."""

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(model="hash", prompt="hi", seed=seed, max_tokens=20, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def story() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="unused") as client:
            together = await asyncio.gather(*(one(client, seed) for seed in range(32)))
            assert together == [await one(client, seed) for seed in range(32)]

    asyncio.run(story())
