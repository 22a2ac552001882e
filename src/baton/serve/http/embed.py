"""`/v1/embeddings`: send each prompt to the cluster as a request for one token, which carries the prompt's vector."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from msgspec import Raw, json
from starlette.types import Receive, Scope, Send

from baton.compute.models.card import ModelCard
from baton.core.errors import RequestError
from baton.core.types import Sampling
from baton.move.clock import now_s
from baton.serve.http.edge import ClientDisconnected, context_of, read_body, run_all, send_bytes, wait_for_disconnect
from baton.serve.http.prompts import Prompt, PromptReader, RequestMaker
from baton.serve.http.service_class import choose_class
from baton.serve.http.services import Services
from baton.serve.http.unknown_fields import send_warning
from baton.serve.http.wire.errors import finish_error
from baton.serve.http.wire.responses import Embedding, EmbeddingList, EmbeddingUsage, PromptTokensDetails
from baton.serve.http.wire.schemas import EMBEDDING_INPUTS_MAX, EmbeddingRequest
from baton.serve.live.gateway import LiveGateway
from baton.serve.live.live_request import LiveRequest, Timings

EMBEDDINGS_PATH = "/v1/embeddings"
IN_FLIGHT_MAX = 64
"""Maximum prompts of one HTTP request that run at a time, so that other requests are served in between."""
INLINE_VALUES_MAX = 1 << 14
"""Maximum values of a response that is encoded in the event loop: 2 ms."""
SAMPLING = Sampling(temperature=0.0, embedding=True)


@dataclass(frozen=True, slots=True)
class _Vector:
    """The embedding of a prompt."""

    values: bytes
    """float32, little-endian."""
    timings: Timings


class Embed:
    """The ASGI endpoint of `/v1/embeddings`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Raises RequestError if it fails before a byte of the response was sent."""
        services = self._services
        try:
            received = await read_body(scope, receive, services.body_limit)
        except ClientDisconnected:
            return
        body, ignored = await services.read(received, EmbeddingRequest)
        send = send_warning(send, ignored)
        model = services.model(body.model)
        card = model.gateway.card
        model.check_ready()
        model.check_engine(SAMPLING)
        _check(body, card)
        add_special = body.add_special_tokens is not False
        reader = PromptReader(texts=model.texts, card=card, param="input", add_special=add_special)
        context = context_of(scope)
        prompts = await model.read_prompts(
            lambda: reader.read(body.input), body.cache_salt, context.identity, param="input", body=received
        )
        context.budget.release_body()
        context.budget.charge(sum(len(prompt.tokens) for prompt in prompts), now_s())
        choice = choose_class(context, body.model, services.settings.classes)
        slo = None if context.is_offline else choice.slo or model.gateway.slo
        maker = RequestMaker(context, body, next(services.serials), slo, choice.service)
        work = _EmbeddingWork(model.gateway, maker)
        vectors = await _run_until_disconnect(receive, work, prompts)
        if vectors is not None:
            as_text = body.encoding_format == "base64"
            encode = partial(_response, card.name, prompts, vectors, body.dimensions, as_text=as_text)
            is_large = len(prompts) * card.embedding_dim > INLINE_VALUES_MAX
            answer = await asyncio.to_thread(encode) if is_large else encode()
            await send_bytes(send, answer, status=200, headers={"content-type": "application/json"})


class _EmbeddingWork:
    """Runs one HTTP request: one request to the cluster for each prompt."""

    def __init__(self, gateway: LiveGateway, maker: RequestMaker) -> None:
        self._gateway = gateway
        self._maker = maker
        self._gate = asyncio.Semaphore(IN_FLIGHT_MAX)

    async def embed_all(self, prompts: Sequence[Prompt]) -> list[_Vector]:
        """Embed every prompt. The first error cancels the others and is raised."""
        return await run_all([self._embed(index, prompt) for index, prompt in enumerate(prompts)])

    async def _embed(self, index: int, prompt: Prompt) -> _Vector:
        async with self._gate:
            live = self._gateway.submit(self._maker.make(index, prompt, SAMPLING, 1), prompt.tokens)
            trace = self._maker.context.trace
            if trace is not None:
                trace.follow(self._gateway.card.name, live)
            try:
                return await self._vector(live)
            finally:
                self._gateway.cancel(live)  # no effect on a request that has ended

    async def _vector(self, live: LiveRequest) -> _Vector:
        values = b""
        while True:
            update = await live.next()
            for token in update.tokens:
                values = token.embedding
                self._gateway.mark_sent(live, 1)
            if update.finish is None:
                continue
            if update.finish.outcome != "finished":
                raise finish_error(update.finish)
            if not values:
                raise RequestError(
                    "the worker returned no embedding: its engine cannot compute embeddings; it may be an earlier"
                    " version on a joined host: run the same version of baton on every host",
                    status=501,
                    code="embeddings_not_computed",
                )
            return _Vector(values, live.timings())


async def _run_until_disconnect(
    receive: Receive, work: _EmbeddingWork, prompts: Sequence[Prompt]
) -> list[_Vector] | None:
    """Embed the prompts. Return None if the client disconnects first."""
    embedding = asyncio.create_task(work.embed_all(prompts))
    watching = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait((embedding, watching), return_when=asyncio.FIRST_COMPLETED)
        return await embedding if embedding.done() else None
    finally:
        for task in (embedding, watching):
            task.cancel()  # this cancels the requests to the cluster too


def _check(body: EmbeddingRequest, card: ModelCard) -> None:
    """Raise RequestError if the model has no embeddings, or not of the requested length."""
    if card.embedding_dim == 0:
        raise RequestError(f"the model {card.name!r} makes no embeddings", status=501, code="embeddings_not_computed")
    if body.dimensions is not None and body.dimensions > card.embedding_dim:
        raise RequestError(
            f"dimensions is {body.dimensions}, the vectors of {card.name!r} have {card.embedding_dim} values; "
            "send at most these",
            param="dimensions",
        )
    many: Sequence[Any] = () if isinstance(body.input, str) else body.input
    if len(many) > EMBEDDING_INPUTS_MAX and not isinstance(many[0], int):
        raise RequestError(
            f"input has {len(many)} prompts, one request may have {EMBEDDING_INPUTS_MAX}; send several requests",
            param="input",
        )


def _response(
    model: str, prompts: Sequence[Prompt], vectors: Sequence[_Vector], dimensions: int | None, *, as_text: bool
) -> bytes:
    """Return the body of a response. Each vector is encoded by itself, so that other threads run between two."""
    prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    cached_tokens = sum(vector.timings.cached_tokens for vector in vectors)
    written = _as_text if as_text else _as_numbers
    parts = [
        Raw(json.encode(Embedding(index=index, embedding=written(cut_vector(vector.values, dimensions)))))
        for index, vector in enumerate(vectors)
    ]
    body = EmbeddingList(
        data=cast("list[Embedding]", parts),
        model=model,
        usage=EmbeddingUsage(
            prompt_tokens=prompt_tokens,
            total_tokens=prompt_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens),
        ),
        timings=max((vector.timings for vector in vectors), key=lambda timings: timings.e2e_s or 0.0),
    )
    return json.encode(body)


def cut_vector(values: bytes, dimensions: int | None) -> bytes:
    """Return the first values of a vector (float32), scaled to length 1. None: all of them, as they are.

    Models that were trained for it lose little (Source: Matryoshka Representation Learning, section 3).
    """
    if dimensions is None or 4 * dimensions == len(values):
        return values
    kept = struct.unpack_from(f"<{dimensions}f", values)
    length = math.hypot(*kept) or 1.0
    return struct.pack(f"<{dimensions}f", *(value / length for value in kept))


def _as_text(values: bytes) -> str:
    return base64.b64encode(values).decode()


def _as_numbers(values: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(values) // 4}f", values))
