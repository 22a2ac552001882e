"""`/v1/embeddings`: the official client, every kind of input, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import threading
from collections.abc import Callable

import httpx
import msgspec
import openai
import pytest

from baton.compute.hash_engine import EMBEDDING_DIM
from baton.serve.http.embed import INLINE_VALUES_MAX, cut_vector
from tests.http.asgi import Connection, scope, settle
from tests.http.conftest import House


@pytest.fixture(params=["server", "hash_server"])
def url(request: pytest.FixtureRequest) -> str:
    """Once over one engine in this process, once over a prefill and a decode worker."""
    return f"{request.getfixturevalue(request.param).url}/v1"


def test_the_official_client_gets_unit_vectors(url: str) -> None:
    """It asks for base64 by itself, and decodes it; asked for numbers, it gets the same ones."""
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        answer = client.embeddings.create(model="hash", input=["a harbour", "a ship", "a harbour"])
        plain = client.embeddings.create(model="hash", input="a ship", encoding_format="float")
    assert [part.index for part in answer.data] == [0, 1, 2]
    first, second, third = (part.embedding for part in answer.data)
    assert first == third != second
    assert plain.data[0].embedding == pytest.approx(second)
    assert len(first) == EMBEDDING_DIM
    assert math.fsum(value * value for value in first) == pytest.approx(1.0, rel=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len("a harbour" * 2 + "a ship")
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["attempts"] == 1


def test_a_prompt_that_comes_again_is_read_from_the_cache(hash_server: object) -> None:
    """And gives the same vector: only its last token is computed."""
    with hash_server.client() as client:
        body = {"input": "the same long text, " * 20}
        first, again = (client.post("/v1/embeddings", json=body).raise_for_status().json() for _ in range(2))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert again["data"] == first["data"]


def test_texts_and_token_ids_are_the_same_prompt(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "a tide"}).json()["tokens"]
    inputs: list[object] = ["a tide", ["a tide"], ids, [ids, ids]]
    found = [client.post("/v1/embeddings", json={"input": given}).raise_for_status().json() for given in inputs]
    assert {tuple(part["embedding"]) for answer in found for part in answer["data"]} == {
        tuple(found[0]["data"][0]["embedding"])
    }
    assert len(found[3]["data"]) == 2


def test_base64_is_little_endian_float32(client: httpx.Client) -> None:
    numbers, text = (
        client.post("/v1/embeddings", json={"input": "x", "encoding_format": kind}).json()["data"][0]["embedding"]
        for kind in ("float", "base64")
    )
    assert list(struct.unpack(f"<{EMBEDDING_DIM}f", base64.b64decode(text))) == numbers


def test_more_prompts_than_run_at_a_time(client: httpx.Client) -> None:
    """In their order, whichever came first."""
    texts = [f"text {index % 7}" for index in range(150)]
    data = client.post("/v1/embeddings", json={"input": texts}).raise_for_status().json()["data"]
    assert [part["index"] for part in data] == list(range(150))
    for index, part in enumerate(data):
        assert part["embedding"] == data[index % 7]["embedding"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"input": []}, 400, "input is an empty list"),
        ({"input": ""}, 400, "prompt is empty"),
        ({"input": ["a", 3]}, 400, "input mixes texts and token ids"),
        ({"input": [[1, 2], []]}, 400, "prompt is empty"),
        ({"input": [999_999]}, 400, "999999"),
        ({"input": "a", "dimensions": 17}, 400, "dimensions is 17, the vectors of 'hash' have 16 values"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format must be"),
        ({"input": "a", "model": "other"}, 404, "is not served here"),
        ({"input": "a" * 5000}, 400, "at most"),
        ({"input": ["a"] * 2049}, 400, "one request may have 2048"),
        ({}, 400, "input is required"),
    ],
)
def test_what_is_refused_says_why(client: httpx.Client, body: dict[str, object], status: int, words: str) -> None:
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_the_models_own_number_of_dimensions_is_welcome(client: httpx.Client) -> None:
    answer = client.post("/v1/embeddings", json={"input": "a", "dimensions": EMBEDDING_DIM})
    assert len(answer.raise_for_status().json()["data"][0]["embedding"]) == EMBEDDING_DIM


def test_a_shorter_vector_is_the_first_values_at_length_one(client: httpx.Client) -> None:
    whole, short = (
        client.post("/v1/embeddings", json={"input": "a", **fields}).raise_for_status().json()["data"][0]["embedding"]
        for fields in ({}, {"dimensions": 5})
    )
    assert math.hypot(*short) == pytest.approx(1, abs=1e-6)
    assert short == pytest.approx([value / math.hypot(*whole[:5]) for value in whole[:5]], abs=1e-6)


def test_many_vectors_are_encoded_in_a_thread(
    build: Callable[..., House], serve: Callable[[House], httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 vectors of 4,096 values would delay all streams for most of a second."""
    threads: list[int] = []

    def note_thread(values: bytes, dimensions: int | None) -> bytes:
        threads.append(threading.get_ident())
        return cut_vector(values, dimensions)

    monkeypatch.setattr("baton.serve.http.embed.cut_vector", note_thread)
    house = build(blocks=2048)
    client, loops = serve(house), list[int]()
    many = INLINE_VALUES_MAX // EMBEDDING_DIM + 1
    for count in (1, many):
        answer = client.post("/v1/embeddings", json={"input": [[5 + index % 200] for index in range(count)]})
        assert [part["index"] for part in answer.raise_for_status().json()["data"]] == [*range(count)]
    house.on_loop(lambda: loops.append(threading.get_ident()))
    assert threads[0] == loops[0]
    assert loops[0] not in threads[1:]


def test_a_full_server_refuses_as_it_refuses_completions(
    build: Callable[..., House], serve: Callable[[House], httpx.Client]
) -> None:
    answer = serve(build(waiting_max=0)).post("/v1/embeddings", json={"input": ["a", "b"]})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


def test_a_model_without_vectors_says_so(build: Callable[..., House], serve: Callable[[House], httpx.Client]) -> None:
    house = build()
    house.gateway.card = msgspec.structs.replace(house.gateway.card, embedding_dim=0)
    answer = serve(house).post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 501
    assert answer.json()["error"]["message"] == "the model 'hash' makes no embeddings"


def test_a_worker_without_vectors_says_where_to_look(
    build: Callable[..., House], serve: Callable[[House], httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option chooses the engine, so none is named."""
    monkeypatch.setattr("baton.compute.hash_engine._unit_vector", lambda _digest: b"")
    answer = serve(build()).post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 501
    assert "run the same version of baton on every host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("admitted", [False, True])
def test_a_client_that_hangs_up_cancels_all_its_prompts(build: Callable[..., House], *, admitted: bool) -> None:
    """While they wait as well as while they hold blocks: every block is free at once."""

    async def story() -> None:
        house = build()
        client = Connection({"input": ["a", "b", "c"]})
        answering = asyncio.create_task(house.app(scope("/v1/embeddings"), client.receive, client.send))
        await settle()
        if admitted:
            house.gateway.admit()
            assert len(house.gateway.running) == 3
        client.hang_up()
        await answering
        await settle()
        assert [one.finish and one.finish.outcome for one in house.gateway.running] == ["cancelled"] * 3 * admitted
        house.gateway.admit()
        assert admitted or not house.gateway.running
        house.gateway.step()
        [worker] = house.gateway.cluster().workers
        assert (worker.running, worker.waiting, worker.kv_blocks_used) == (0, 0, 0)
        assert client.sent == []

    asyncio.run(story())
