"""Serve completions and chats: turn a body into requests to the cluster, and their output into a response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import Message, Receive, Scope, Send

from baton.core.errors import RequestError
from baton.core.types import Sampling
from baton.move.clock import now_s, unix_s
from baton.serve.http.choice import ChoiceDelta, ChoiceText, TextRules
from baton.serve.http.edge import (
    ClientDisconnected,
    RequestContext,
    context_of,
    read_body,
    run_all,
    send_bytes,
    wait_for_disconnect,
)
from baton.serve.http.prompts import Prompt, RequestMaker
from baton.serve.http.resume import Continuation, StreamSaver, owner_of
from baton.serve.http.service_class import choose_class
from baton.serve.http.services import Services
from baton.serve.http.slo import asked_slo
from baton.serve.http.text_request import TextRequest
from baton.serve.http.wire.constraint import Constraint
from baton.serve.http.wire.encoders import ResponseEncoder, ResponseHead, WholeChoice
from baton.serve.http.wire.errors import error_body
from baton.serve.http.wire.parsing import parse_object
from baton.serve.http.wire.responses import PromptTokensDetails, Usage
from baton.serve.http.wire.sampling import SEED_BITS, for_choice, sampling_of
from baton.serve.live.gateway import SERVING_STATES, LiveGateway
from baton.serve.live.hooks import Filters
from baton.serve.live.live_request import Timings

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
INLINE_ENTRIES_MAX = 256
"""Maximum log probabilities that are encoded in the event loop: 20 ms if each has 20 alternatives."""


class Generate:
    """The ASGI endpoint of one route that generates text."""

    def __init__(self, services: Services, kind: type[TextRequest]) -> None:
        self._services = services
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Raises RequestError if it fails before a byte of the response was sent."""
        try:
            raw = await read_body(scope, receive, self._services.settings.body_bytes_max)
        except ClientDisconnected:
            return
        context = context_of(scope)
        continued = await self._services.streams.continuation(context.headers, context.identity, self._kind.PATH)
        if continued is None:
            await self._respond(scope, receive, send, raw, None)
            return
        watched = _WatchedSend(send)
        try:
            await self._respond(scope, receive, watched, continued.stream.body, continued)
        finally:
            await continued.end(has_begun=watched.has_begun)

    async def _respond(
        self, scope: Scope, receive: Receive, send: Send, raw: bytes, continued: Continuation | None
    ) -> None:
        response, stream = await self._accept(scope, raw, continued)
        budget = context_of(scope).budget
        budget.release_body()
        try:
            await response.run(receive, send, stream=stream)
        finally:
            budget.charge(response.usage().total_tokens, now_s())

    async def _accept(self, scope: Scope, raw: bytes, continued: Continuation | None) -> tuple[TextResponse, bool]:
        """Check and submit a request. Return its response, and whether to stream it. Raises RequestError."""
        services, kind = self._services, self._kind
        body = services.hooks.before(parse_object(raw), kind.PATH)
        request = kind.read(body, services, owner_of(context_of(scope).identity))
        model = request.model
        model.check_ready()
        context, constraint = context_of(scope), request.constraint()
        if constraint is not None:
            await model.grammars.check(constraint, context.client)
        prompts = await model.read_prompts(
            request.prompts, request.fields.cache_salt, context.identity, param=kind.PROMPT_PARAM, size=len(raw)
        )
        choices_count = self._choices_count(request, prompts)
        choice = choose_class(context, request.fields.model, services.settings.classes)
        slo = asked_slo(context.slo, request.fields.slo, choice.slo or model.gateway.slo)
        maker = RequestMaker(context, request.fields, next(services.serials), slo, choice.service)
        filters = [services.hooks.begin(body, kind.PATH) for _ in range(choices_count)]
        prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        head = self._head(request, context, continued, prompt_tokens=prompt_tokens)
        is_plain = kind.CAN_RESUME and not services.hooks.output
        can_be_saved = choices_count == 1 and services.streams.is_used and is_plain
        response = TextResponse(
            model.gateway,
            self._start(request, prompts, maker, filters, constraint, continued),
            prompt_tokens=prompt_tokens,
            encoder=request.encoder(head),
            include_usage=_include_usage(request),
            saver=StreamSaver(
                streams=services.streams,
                path=kind.PATH,
                owner=owner_of(context.identity),
                body=raw,
                response_id=head.id,
            )
            if can_be_saved
            else None,
        )
        return response, bool(request.fields.stream)

    def _choices_count(self, request: TextRequest, prompts: Sequence[Prompt]) -> int:
        per_prompt, most = request.fields.n or 1, self._services.settings.choices_max
        count = len(prompts) * per_prompt
        if count > most:
            raise RequestError(
                f"{len(prompts)} prompts with n={per_prompt} make {count} choices, "
                f"one request may have {most} (http.choices_max); send several requests",
                param="n" if len(prompts) == 1 else request.PROMPT_PARAM,
            )
        return count

    def _head(
        self, request: TextRequest, context: RequestContext, continued: Continuation | None, *, prompt_tokens: int
    ) -> ResponseHead:
        new_id = f"{request.ID_PREFIX}{context.request_id}"
        return ResponseHead(
            id=new_id if continued is None else continued.stream.response_id,
            created=unix_s(),
            model=request.model.name,
            prompt_tokens=prompt_tokens,
            include_usage=_include_usage(request),
        )

    def _start(
        self,
        request: TextRequest,
        prompts: Sequence[Prompt],
        maker: RequestMaker,
        filters: Sequence[Filters],
        constraint: Constraint | None,
        continued: Continuation | None,
    ) -> list[ChoiceText]:
        """Submit one request per choice. Choice j of prompt i has index i * n + j. Raises RequestError (400, 409)."""
        model, gateway = request.model, request.model.gateway
        sent = continued.stream.output if continued is not None else ()
        sampling = sampling_of(
            request.fields,
            gateway.card,
            drawn_seed=self._services.seeds.getrandbits(SEED_BITS) if continued is None else continued.stream.seed,
            grammar=None if constraint is None else constraint.grammar,
        )
        model.check_engine(sampling)
        asked_tokens = request.output_tokens_max()
        shown_tokens = frozenset[int]() if request.tools is None else request.tools.shown_tokens(model.tokenizer)
        choices: list[ChoiceText] = []
        for index, choice_filters in enumerate(filters):
            prompt_index, number = divmod(index, request.fields.n or 1)
            prompt = prompts[prompt_index]
            room_tokens = gateway.request_tokens_max - len(prompt.tokens)
            tokens_max = room_tokens if asked_tokens is None else min(asked_tokens, room_tokens)
            own_sampling = for_choice(sampling, number, output_tokens_max=tokens_max)
            if continued is not None:
                continued.check(prompt.whole_hash, tokens_max)
            made = maker.make(index, prompt, own_sampling, max(1, tokens_max), resumed_tokens=len(sent))
            choice = ChoiceText(
                index=index,
                prompt_index=prompt_index,
                prompt=prompt,
                live=gateway.submit(made, [*prompt.tokens, *sent]),
                rules=self._rules(request, sampling, shown_tokens, tokens_max=tokens_max),
                filters=choice_filters,
                calls=None if request.tools is None else request.tools.parser(made.id),
            )
            choice.replay(sent)
            choices.append(choice)
        return choices

    def _rules(
        self, request: TextRequest, sampling: Sampling, shown_tokens: frozenset[int], *, tokens_max: int
    ) -> TextRules:
        stop = request.fields.stop or []
        return TextRules(
            tokenizer=request.model.tokenizer,
            stop_strings=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            tokens_min=request.fields.min_tokens or 0,
            tokens_max=tokens_max,
            with_logprobs=sampling.top_logprobs is not None,
            follows_text=request.FOLLOWS_TEXT,
            shown_tokens=shown_tokens,
        )


def _include_usage(request: TextRequest) -> bool:
    options = request.fields.stream_options
    return bool(request.fields.stream and options and options.include_usage)


class TextResponse:
    """The response to one HTTP request: sends the choices, and cancels them once the client disconnects."""

    def __init__(
        self,
        gateway: LiveGateway,
        choices: Sequence[ChoiceText],
        *,
        prompt_tokens: int,
        encoder: ResponseEncoder,
        include_usage: bool,
        saver: StreamSaver | None,
    ) -> None:
        """`prompt_tokens`: sum over the prompts, not the choices. `saver`: None if the stream cannot be resumed."""
        self._gateway = gateway
        self._choices = choices
        self._prompt_tokens = prompt_tokens
        self._encoder = encoder
        self._include_usage = include_usage
        self._saver = saver
        self._disconnected = False

    async def run(self, receive: Receive, send: Send, *, stream: bool) -> None:
        """Send the response. Raises RequestError if it fails before a byte of the response was sent."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(_EventStream(send)) if stream else self._send_whole(send))
        except RequestError:
            if not self._disconnected:
                raise
        finally:
            watcher.cancel()
            self._cancel_all()

    async def _watch(self, receive: Receive) -> None:
        """Cancel all choices once the client disconnects. Their results then end the response."""
        await wait_for_disconnect(receive)
        self._disconnected = True
        self._cancel_all()

    def _cancel_all(self) -> None:
        for choice in self._choices:
            self._gateway.cancel(choice.live)  # no effect on a choice that has ended

    async def _next(self, choice: ChoiceText) -> ChoiceDelta:
        """Wait for new tokens of a choice, and return the parts that can be sent to the client now."""
        delta = choice.apply(await choice.live.next())
        if choice.is_cut_short:  # ended by its text (stop string, last call): stop the worker
            self._gateway.finish(choice.live)
        return delta

    def _mark_sent(self, choice: ChoiceText) -> None:
        tokens = choice.take_unsent_tokens()
        if tokens:
            self._gateway.mark_sent(choice.live, tokens)

    async def _send_whole(self, send: Send) -> None:
        whole = await run_all([self._collect(choice) for choice in self._choices])
        usage, timings = self.usage(), self._timings()
        entries = sum(len(choice.entries) for choice in whole)
        body = await _encode(lambda: self._encoder.whole(whole, usage, timings), entries)
        await send_bytes(send, body, status=200, headers={"content-type": "application/json"})

    async def _collect(self, choice: ChoiceText) -> WholeChoice:
        deltas: list[ChoiceDelta] = []
        while choice.finish_reason is None:
            deltas.append(await self._next(choice))
            self._mark_sent(choice)
        entries = [entry for delta in deltas for entry in delta.entries]
        calls = [part for delta in deltas for part in delta.calls]
        text = "".join([delta.text for delta in deltas])
        chat_finish = choice.chat_finish or choice.finish_reason
        return WholeChoice(choice.index, text, entries, choice.finish_reason, calls, chat_finish, choice.stop_string)

    async def _stream(self, events: _EventStream) -> None:
        """Stream all choices. The status is sent with the first text, so an earlier error can set another status."""
        try:
            await run_all([self._stream_choice(choice, events) for choice in self._choices])
        except RequestError as error:
            if not events.is_open:
                raise
            await events.send(self._encoder.error(error_body(await self._resumable(error))))
        else:
            if self._disconnected:
                return
            if self._include_usage:
                await events.send(self._encoder.usage(self.usage(), self._timings()))
            if self._encoder.END:
                await events.send(self._encoder.END)
        await events.close()

    async def _resumable(self, error: RequestError) -> RequestError:
        """Return the error for the client. If the server's end caused it, save the stream, so it can be resumed."""
        if self._saver is None or self._disconnected or self._gateway.state in SERVING_STATES:
            return error
        return await self._saver.save(self._choices[0]) or error

    async def _stream_choice(self, choice: ChoiceText, events: _EventStream) -> None:
        first = not choice.live.request.resumed_tokens
        while choice.finish_reason is None:
            delta = await self._next(choice)
            if self._disconnected:
                return  # encoding the many unread tokens of a client that is gone would delay other streams
            if delta or (first and choice.finish_reason is not None):
                await events.send(await self._delta(choice, delta, first=first))
                self._mark_sent(choice)
                first = False
        self._mark_sent(choice)
        chat_finish = choice.chat_finish or choice.finish_reason
        timings = choice.live.timings()
        await events.send(self._encoder.last(choice.index, chat_finish, timings, stop_string=choice.stop_string))

    async def _delta(self, choice: ChoiceText, delta: ChoiceDelta, *, first: bool) -> bytes:
        return await _encode(lambda: self._encoder.delta(choice.index, delta, first=first), len(delta.entries))

    def usage(self) -> Usage:
        """Count the tokens. `cached_tokens` counts the first choice of each prompt: the others reuse its blocks."""
        output_tokens = sum(choice.output_tokens for choice in self._choices)
        firsts = {choice.prompt_index: choice for choice in reversed(self._choices)}
        cached_tokens = sum(choice.live.timings().cached_tokens for choice in firsts.values())
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=output_tokens,
            total_tokens=self._prompt_tokens + output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens),
        )

    def _timings(self) -> Timings:
        """Return the timings of the slowest choice."""
        return max((choice.live.timings() for choice in self._choices), key=lambda timings: timings.e2e_s or 0.0)


class _WatchedSend:
    """A `send` that notes whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)


async def _encode(encode: Callable[[], bytes], entries: int) -> bytes:
    """Run `encode` on `entries` log probabilities: in a thread if they are many, to not delay other streams."""
    return await asyncio.to_thread(encode) if entries > INLINE_ENTRIES_MAX else encode()


class _EventStream:
    """A response of server-sent events. The first event sends the status and the headers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_open = False

    async def send(self, event: bytes) -> None:
        if not self.is_open:
            self.is_open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})
