"""`/v1/embeddings`: every prompt becomes a request for one token, which brings the vector of the prompt with it."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import json
from starlette.types import Receive, Scope, Send

from baton.compute.models.card import ModelCard
from baton.core.errors import RequestError
from baton.core.types import Sampling
from baton.serve.http.arrival import Arrival, arrival_of, send_bytes
from baton.serve.http.body import ClientGone, read_body
from baton.serve.http.generate import check_model, check_ready
from baton.serve.http.prompts import Prompt, PromptReader
from baton.serve.http.requests import Requests, all_of, checked_prompts, hang_up
from baton.serve.http.services import Services
from baton.serve.http.wire.errors import refusal
from baton.serve.http.wire.parsing import convert, parse_object
from baton.serve.http.wire.responses import Embedding, EmbeddingList, EmbeddingUsage, PromptTokensDetails
from baton.serve.http.wire.schemas import EMBEDDING_INPUTS_MAX, EmbeddingRequest
from baton.serve.live.port import Generation, Timings

EMBEDDINGS_PATH = "/v1/embeddings"
IN_FLIGHT_MAX = 64
"""Prompts of one request that the cluster has at a time: others' requests come between them."""
ASK = Sampling(temperature=0.0, embedding=True)


@dataclass(frozen=True, slots=True)
class _Vector:
    """What came of one prompt."""

    values: bytes
    """float32, little-endian."""
    timings: Timings


class Embed:
    """ASGI endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises RequestError as long as nothing was sent."""
        try:
            raw = await read_body(scope, receive, self._services.settings.body_bytes_max)
        except ClientGone:
            return
        body = convert(parse_object(raw), EmbeddingRequest)
        card = self._services.gateway.card
        check_model(body.model, card.name)
        check_ready(self._services.gateway)
        _check(body, card)
        prompts = await self._prompts(body, size=len(raw))
        work = _Embedding(self._services, body, arrival_of(scope))
        vectors = await _until_hang_up(receive, work, prompts)
        if vectors is not None:
            answer = _answer(card.name, prompts, vectors, as_text=body.encoding_format == "base64")
            await send_bytes(send, json.encode(answer), status=200, headers={"content-type": "application/json"})

    async def _prompts(self, body: EmbeddingRequest, *, size: int) -> list[Prompt]:
        services = self._services
        reader = PromptReader(
            tokenizer=services.tokenizer,
            card=services.gateway.card,
            param="input",
            add_special=body.add_special_tokens is not False,
        )
        return await checked_prompts(services, lambda: reader.read(body.input), body, param="input", size=size)


class _Embedding:
    """One HTTP request as requests to the cluster."""

    def __init__(self, services: Services, body: EmbeddingRequest, arrival: Arrival) -> None:
        self._services = services
        self._requests = Requests(arrival, body, next(services.serials))
        self._gate = asyncio.Semaphore(IN_FLIGHT_MAX)

    async def all(self, prompts: Sequence[Prompt]) -> list[_Vector]:
        """Embed every prompt. The first error ends the others, and is raised."""
        return await all_of([self._one(index, prompt) for index, prompt in enumerate(prompts)])

    async def _one(self, index: int, prompt: Prompt) -> _Vector:
        async with self._gate:
            generation = self._services.gateway.submit(self._requests.make(index, prompt, ASK, 1), prompt.tokens)
            try:
                return await _vector(generation)
            finally:
                generation.cancel()  # harmless after the end


async def _vector(generation: Generation) -> _Vector:
    values = b""
    while True:
        update = await generation.next()
        for token in update.tokens:
            values = token.embedding
            generation.mark_sent(1)
        if update.finish is None:
            continue
        if update.finish.outcome != "finished":
            raise refusal(update.finish)
        if not values:
            raise RequestError(
                "no embedding came back: the worker of this prompt has an engine without them, such as one of an"
                " earlier version on a host that joined; run the same version of baton on every host",
                status=501,
                code="embeddings_not_computed",
            )
        return _Vector(values, generation.timings())


async def _until_hang_up(receive: Receive, work: _Embedding, prompts: Sequence[Prompt]) -> list[_Vector] | None:
    """Embed, and give up once the client is gone: then None."""
    embedding = asyncio.create_task(work.all(prompts))
    watching = asyncio.create_task(hang_up(receive))
    try:
        await asyncio.wait((embedding, watching), return_when=asyncio.FIRST_COMPLETED)
        return await embedding if embedding.done() else None
    finally:
        for task in (embedding, watching):
            task.cancel()  # every generation that still runs is cancelled with it


def _check(body: EmbeddingRequest, card: ModelCard) -> None:
    """Refuse what this model cannot do."""
    if card.embedding_dim == 0:
        raise RequestError(f"the model {card.name!r} makes no embeddings", status=501, code="embeddings_not_computed")
    if body.dimensions not in (None, card.embedding_dim):
        raise RequestError(
            f"dimensions is {body.dimensions}, the vectors of {card.name!r} have {card.embedding_dim} values and "
            "cannot be cut; leave dimensions out",
            param="dimensions",
            code="unsupported_parameter",
        )
    many: Sequence[Any] = () if isinstance(body.input, str) else body.input
    if len(many) > EMBEDDING_INPUTS_MAX and not isinstance(many[0], int):
        raise RequestError(
            f"input has {len(many)} prompts, one request may have {EMBEDDING_INPUTS_MAX}; send several requests",
            param="input",
        )


def _answer(model: str, prompts: Sequence[Prompt], vectors: Sequence[_Vector], *, as_text: bool) -> EmbeddingList:
    prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    cached_tokens = sum(vector.timings.cached_tokens for vector in vectors)
    written = [_as_text(vector.values) if as_text else _as_numbers(vector.values) for vector in vectors]
    return EmbeddingList(
        data=[Embedding(index=index, embedding=values) for index, values in enumerate(written)],
        model=model,
        usage=EmbeddingUsage(
            prompt_tokens=prompt_tokens,
            total_tokens=prompt_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens),
        ),
        timings=max((vector.timings for vector in vectors), key=lambda timings: timings.e2e_s or 0.0),
    )


def _as_text(values: bytes) -> str:
    return base64.b64encode(values).decode()


def _as_numbers(values: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(values) // 4}f", values))
