"""The generating routes: from a body to generations to an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from baton.core.errors import RequestError
from baton.core.types import Sampling
from baton.move.clock import unix_s
from baton.serve.http.answer import Answer
from baton.serve.http.arrival import Arrival, arrival_of
from baton.serve.http.body import ClientGone, read_body
from baton.serve.http.choice import Choice, TextRules
from baton.serve.http.prompts import Prompt
from baton.serve.http.requests import Requests, checked_prompts
from baton.serve.http.routes import Ask, GeneratingRoute
from baton.serve.http.services import Services
from baton.serve.http.wire.constraint import Constraint
from baton.serve.http.wire.dialect import Head
from baton.serve.http.wire.errors import RETRY_AFTER_S, Refused
from baton.serve.http.wire.parsing import parse_object
from baton.serve.http.wire.sampling import SEED_BITS, for_choice, sampling_of
from baton.serve.live.hooks import Filters
from baton.serve.live.port import Gateway


class Generate:
    """ASGI endpoint of one generating route."""

    def __init__(self, services: Services, route: GeneratingRoute) -> None:
        self._services = services
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises RequestError as long as nothing was sent."""
        try:
            raw = await read_body(scope, receive, self._services.settings.body_bytes_max)
        except ClientGone:
            return
        sent = self._services.hooks.before(parse_object(raw), self._route.path)
        ask = self._route.read(sent)
        check_model(ask.fields.model, self._services.gateway.card.name)
        check_ready(self._services.gateway)
        constraint = await self._constraint(ask)
        prompts = await checked_prompts(
            self._services, ask.prompts, ask.fields, param=self._route.prompt_param, size=len(raw)
        )
        order = _Order(self._services, self._route, ask, prompts, arrival_of(scope))
        filters = [self._services.hooks.begin(sent, self._route.path) for _ in range(order.choices)]
        answer = Answer(
            order.submit(filters, constraint),
            prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
            dialect=ask.dialect(order.head()),
            include_usage=order.include_usage,
        )
        await answer.run(receive, send, stream=bool(ask.fields.stream))

    async def _constraint(self, ask: Ask) -> Constraint | None:
        """Check what the output has to match, in a thread: a schema of a client's takes as long as it likes."""
        constraint = ask.constraint()
        if constraint is not None:
            await asyncio.to_thread(constraint.check, self._services.gateway.card)
        return constraint


class _Order:
    """One HTTP request as requests to the cluster: `n` choices of every prompt."""

    def __init__(
        self,
        services: Services,
        route: GeneratingRoute,
        ask: Ask,
        prompts: Sequence[Prompt],
        arrival: Arrival,
    ) -> None:
        self._services = services
        self._route = route
        self._ask = ask
        self._body = ask.fields
        self._prompts = prompts
        self._arrival = arrival
        self._requests = Requests(arrival, ask.fields, next(services.serials))
        self._per_prompt = ask.fields.n or 1
        self.choices = len(prompts) * self._per_prompt
        use = ask.tools()
        self._shown_tokens = frozenset[int]() if use is None else use.shown_tokens(services.tokenizer)
        options = ask.fields.stream_options
        self.include_usage = bool(ask.fields.stream and options and options.include_usage)
        self._check_choices()

    def head(self) -> Head:
        """Name the answer."""
        return Head(
            id=f"{self._route.id_prefix}{self._arrival.request_id}",
            created=unix_s(),
            model=self._services.gateway.card.name,
            include_usage=self.include_usage,
        )

    def submit(self, filters: Sequence[Filters], constraint: Constraint | None) -> list[Choice]:
        """Check, then start every choice: choice j of prompt i has index i * n + j."""
        sampling = sampling_of(
            self._body,
            self._services.gateway.card,
            drawn_seed=self._services.seeds.getrandbits(SEED_BITS),
            grammar=None if constraint is None else constraint.grammar,
        )
        wanted = self._ask.output_tokens()
        return [self._choice(index, sampling, wanted, part) for index, part in enumerate(filters)]

    def _choice(self, index: int, sampling: Sampling, wanted: int | None, filters: Filters) -> Choice:
        prompt_index, number = divmod(index, self._per_prompt)
        prompt = self._prompts[prompt_index]
        room = self._services.gateway.request_tokens_max - len(prompt.tokens)
        most = room if wanted is None else min(wanted, room)
        request = self._requests.make(index, prompt, for_choice(sampling, number, output_tokens_max=most), max(1, most))
        use = self._ask.tools()
        return Choice(
            index=index,
            prompt_index=prompt_index,
            prompt=prompt,
            generation=self._services.gateway.submit(request, prompt.tokens),
            rules=self._rules(sampling, tokens_max=most),
            filters=filters,
            calls=None if use is None else use.parser(request.id),
        )

    def _rules(self, sampling: Sampling, *, tokens_max: int) -> TextRules:
        stop = self._body.stop or []
        return TextRules(
            tokenizer=self._services.tokenizer,
            stop_strings=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            tokens_min=self._body.min_tokens or 0,
            tokens_max=tokens_max,
            with_logprobs=sampling.top_logprobs is not None,
            follows_text=self._route.follows_text,
            shown_tokens=self._shown_tokens,
        )

    def _check_choices(self) -> None:
        most = self._services.settings.choices_max
        if self.choices > most:
            prompts = len(self._prompts)
            raise RequestError(
                f"{prompts} prompts with n={self._per_prompt} make {self.choices} choices, "
                f"one request may have {most}; send several requests",
                param="n" if prompts == 1 else self._route.prompt_param,
            )


def check_model(asked: str | None, served: str) -> None:
    """Raise RequestError (404) for another model than the one that is served. No name means that one."""
    if asked is not None and asked != served:
        message = f"the model {asked[:200]!r} is not served here; this server has {served!r}"
        raise RequestError(message, param="model", status=404, code="model_not_found")


def not_ready(gateway: Gateway) -> str:
    """Say that the cluster cannot take requests, and what it waits for."""
    awaited = gateway.awaited()
    return f"the server is not ready: {gateway.state}" + (f", waiting for {awaited}" if awaited else "")


def check_ready(gateway: Gateway) -> None:
    """Raise Refused (503) while the cluster cannot take requests."""
    if gateway.state != "ready":
        message = f"{not_ready(gateway)}; wait for /health to answer 200"
        raise Refused(message, status=503, code="not_ready", retry_after_s=RETRY_AFTER_S)
