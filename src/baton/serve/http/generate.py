"""Serve completions and chats: turn a body into requests to the cluster, and their output into a response."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from baton.core.errors import RequestError
from baton.core.types import Sampling
from baton.move.clock import now_s, unix_s
from baton.serve.http.body_threads import ReceivedBody
from baton.serve.http.choice import ChoiceText, TextRules
from baton.serve.http.edge import BodyLimit, ClientDisconnected, RequestContext, context_of, read_body, too_large
from baton.serve.http.prompts import Prompt, RequestMaker, prompts_count
from baton.serve.http.resume import Continuation, StreamSaver, is_resumable, owner_of
from baton.serve.http.service_class import choose_class
from baton.serve.http.services import Services
from baton.serve.http.slo import asked_slo
from baton.serve.http.stream_marks import ASKING_HEADER, STREAM_TYPE, StreamMarks, carried_stream
from baton.serve.http.text_request import TextRequest
from baton.serve.http.text_response import TextResponse, UsageChunks
from baton.serve.http.unknown_fields import send_warning
from baton.serve.http.wire.constraint import Constraint
from baton.serve.http.wire.encoders import ResponseHead
from baton.serve.http.wire.parsing import parse_object
from baton.serve.http.wire.sampling import SEED_BITS, check_tokens, for_choice, sampling_of
from baton.serve.http.wire.schemas import CompletionRequest
from baton.serve.live.hooks import Filters


class Generate:
    """The ASGI endpoint of one route that generates text."""

    def __init__(self, services: Services, kind: type[TextRequest]) -> None:
        self._services = services
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Raises RequestError if it fails before a byte of the response was sent."""
        context, limit = context_of(scope), self._services.body_limit
        is_carried = self._kind.CAN_RESUME and context.headers.get(b"content-type") == STREAM_TYPE.encode()
        try:
            received = await read_body(scope, receive, _carried_limit(limit) if is_carried else limit)
        except ClientDisconnected:
            return
        streams = self._services.streams
        if is_carried:
            path, owner = self._kind.PATH, owner_of(context.identity)
            stream = await self._services.parsing.run(lambda: carried_stream(received.raw, path, owner), received)
            if len(stream.body) > limit.bytes_max:
                raise too_large(len(stream.body), limit)
            continued = Continuation("", stream, streams)
        else:
            continued = await streams.continuation(context.headers, context.identity, self._kind.PATH)
        if continued is None:
            await self._respond(scope, receive, send, received, None)
            return
        watched = _WatchedSend(send)
        try:
            first = ReceivedBody(continued.stream.body, received.client)
            await self._respond(scope, receive, watched, first, continued)
        finally:
            await continued.end(has_begun=watched.has_begun)

    async def _respond(
        self, scope: Scope, receive: Receive, send: Send, received: ReceivedBody, continued: Continuation | None
    ) -> None:
        context = context_of(scope)
        body, request, ignored = await self._read(received, owner_of(context.identity))
        response = await self._accept(context, received, body, request, continued)
        budget = context.budget
        budget.release_body()
        try:
            await response.run(receive, send_warning(send, ignored), stream=bool(request.fields.stream))
        finally:
            usage = response.usage()
            budget.charge(usage.total_tokens, now_s())
            if context.trace is not None:
                context.trace.describe(request.fields, usage, tokens_max=request.output_tokens_max())

    async def _read(self, received: ReceivedBody, owner: str) -> tuple[dict[str, Any], TextRequest, list[str]]:
        """Return the body for output hooks, the request, and the paths of ignored fields. Raises RequestError.

        A large body is parsed and checked in one turn: its parts take much memory, and would wait for another turn.
        """
        services = self._services
        if services.hooks.request:  # they run on the event loop
            body = services.hooks.before(await services.parse(received), self._kind.PATH)
            return await services.parsing.run(lambda: self._checked(body, owner), received)
        return await services.parsing.run(lambda: self._checked(parse_object(received.raw), owner), received)

    def _checked(self, body: dict[str, Any], owner: str) -> tuple[dict[str, Any], TextRequest, list[str]]:
        services, kind = self._services, self._kind
        read = partial(kind.read, services=services, owner=owner)
        request, ignored = services.unknown_fields.read(body, kind.BODY, read)
        self._choices_count(request)  # before any of a million prompts waits for its tokens
        return body if services.hooks.output else {}, request, ignored

    async def _accept(
        self,
        context: RequestContext,
        received: ReceivedBody,
        body: dict[str, Any],
        request: TextRequest,
        continued: Continuation | None,
    ) -> TextResponse:
        """Check and submit a request, and return its response. Raises RequestError."""
        services, kind = self._services, self._kind
        model = request.model
        model.check_ready()
        constraint = await services.parsing.run(request.constraint, received)
        if constraint is not None:
            await model.grammars.check(constraint, context.client)
        choices_count = self._choices_count(request)
        prompts = await model.read_prompts(
            request.prompts, request.fields.cache_salt, context.identity, param=kind.PROMPT_PARAM, body=received
        )
        choice = choose_class(context, request.fields.model, services.settings.classes)
        slo = asked_slo(context.slo, request.fields.slo, choice.slo or model.gateway.slo)
        slo = None if context.is_offline else slo
        maker = RequestMaker(context, request.fields, next(services.serials), slo, choice.service)
        filters = [services.hooks.begin(body, kind.PATH) for _ in range(choices_count)]
        if continued is not None and choices_count > 1:
            raise RequestError(f"a stream with {choices_count} choices cannot be continued; send the request again")
        prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        head = self._head(request, context, continued, prompt_tokens=prompt_tokens)
        is_plain = kind.CAN_RESUME and not services.hooks.output
        can_continue = choices_count == 1 and is_plain
        choices = self._start(request, prompts, maker, filters, constraint, continued)
        has_marks = can_continue and ASKING_HEADER in context.headers and is_resumable(choices[0])
        return TextResponse(
            model.gateway,
            choices,
            encoder=request.encoder(head),
            usage_chunks=_usage_chunks(request),
            saver=StreamSaver(
                streams=services.streams,
                path=kind.PATH,
                owner=owner_of(context.identity),
                body=received.raw,
                response_id=head.id,
            )
            if can_continue and services.streams.is_used
            else None,
            marks=StreamMarks(head.id) if has_marks else None,
        )

    def _choices_count(self, request: TextRequest) -> int:
        fields, most = request.fields, self._services.settings.choices_max
        prompts, per_prompt = (
            prompts_count(fields.prompt) if isinstance(fields, CompletionRequest) else 1,
            fields.n or 1,
        )
        count = prompts * per_prompt
        if count > most:
            raise RequestError(
                f"{prompts} prompts with n={per_prompt} make {count} choices, "
                f"one request may have {most} (http.choices_max); send several requests",
                param="n" if prompts == 1 else request.PROMPT_PARAM,
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
            include_usage=_usage_chunks(request) != "none",
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
            model.tokenizer,
            drawn_seed=self._services.seeds.getrandbits(SEED_BITS) if continued is None else continued.stream.seed,
            grammar=None if constraint is None else constraint.grammar,
        )
        model.check_engine(sampling)
        asked_tokens = request.output_tokens_max()
        shown_tokens = frozenset[int]() if request.tools is None else request.tools.shown_tokens(model.tokenizer)
        choices: list[ChoiceText] = []
        with ExitStack() as failing:  # it cancels the submitted requests if a later step fails
            for index, choice_filters in enumerate(filters):
                prompt_index, number = divmod(index, request.fields.n or 1)
                prompt = prompts[prompt_index]
                room_tokens = gateway.request_tokens_max - len(prompt.tokens)
                tokens_max = room_tokens if asked_tokens is None else min(asked_tokens, room_tokens)
                own_sampling = for_choice(sampling, number, output_tokens_max=tokens_max)
                if continued is not None:
                    if prompt.echo is not None or sampling.top_logprobs is not None:
                        raise RequestError("a stream with echo or log probabilities cannot be continued")
                    continued.check(prompt.whole_hash, tokens_max)
                    check_tokens(sent, gateway.card.vocab_tokens, "output")
                made = maker.make(index, prompt, own_sampling, max(1, tokens_max), resumed_tokens=len(sent))
                choice = ChoiceText(
                    index=index,
                    prompt_index=prompt_index,
                    prompt=prompt,
                    rules=self._rules(request, sampling, shown_tokens, tokens_max=tokens_max),
                    filters=choice_filters,
                    calls=None if request.tools is None else request.tools.parser(made.id),
                    reasoning=request.reasoning(prompt, is_constrained=constraint is not None),
                    live=gateway.submit(made, [*prompt.tokens, *sent]),
                )
                failing.callback(gateway.cancel, choice.live)
                choice.replay(sent)
                choices.append(choice)
                if maker.context.trace is not None:
                    maker.context.trace.follow(model.name, choice.live)
            failing.pop_all()
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
            with_token_ids=bool(request.fields.return_token_ids),
            follows_text=request.FOLLOWS_TEXT,
            shown_tokens=shown_tokens,
            skip_special=request.fields.skip_special_tokens is not False,
            keep_stop_string=bool(request.fields.include_stop_str_in_output),
        )


def _carried_limit(limit: BodyLimit) -> BodyLimit:
    """Return the limit of a body with a stream: the client's body, and as many bytes of tokens."""
    return BodyLimit(2 * limit.bytes_max, kind=STREAM_TYPE)


def _usage_chunks(request: TextRequest) -> UsageChunks:
    options = request.fields.stream_options
    if not request.fields.stream or options is None or not options.include_usage:
        return "none"
    return "all" if options.continuous_usage_stats else "last"


class _WatchedSend:
    """A `send` that notes whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)
