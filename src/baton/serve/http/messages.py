"""Anthropic's Messages API over the same requests as chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.serve.http.edge import read_body
from baton.serve.http.pages import json_response
from baton.serve.http.prompts import chat_prompt
from baton.serve.http.services import Services
from baton.serve.http.text_request import ChatText, TextRequest
from baton.serve.http.tools.use import tool_use
from baton.serve.http.unknown_fields import warning_headers
from baton.serve.http.wire.encoders import ResponseEncoder, ResponseHead
from baton.serve.http.wire.errors import MESSAGES_PATH
from baton.serve.http.wire.messages import (
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
    chat_request,
    prompt_fields,
)
from baton.serve.http.wire.messages_encoder import MessagesEncoder
from baton.serve.http.wire.parsing import convert, parse_object
from baton.serve.http.wire.schemas import ChatRequest


@dataclass(frozen=True, slots=True)
class MessagesText(ChatText):
    """A request to `/v1/messages`."""

    PATH = MESSAGES_PATH
    BODY = MessagesRequest
    ID_PREFIX = "msg_"
    CAN_RESUME = False
    SPLITS_REASONING = False

    @classmethod
    def read(cls, body: dict[str, Any], services: Services, owner: str) -> TextRequest:
        fields = chat_request(convert(body, MessagesRequest))
        model = services.model(fields.model)
        return cls(fields, model, tool_use(fields, model.template.source))

    def encoder(self, head: ResponseHead) -> ResponseEncoder:
        return MessagesEncoder(head)


class Messages:
    """The endpoint that counts tokens."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [Route(f"{MESSAGES_PATH}/count_tokens", self._count_tokens, methods=["POST"])]

    async def _count_tokens(self, request: Request) -> Response:
        received = await read_body(request.scope, request.receive, self._services.body_limit)
        services = self._services

        def read() -> tuple[ChatRequest, list[str]]:
            return services.unknown_fields.read(
                parse_object(received.raw),
                CountTokensRequest,
                lambda known: prompt_fields(convert(known, CountTokensRequest)),
            )

        fields, ignored = await services.parsing.run(read, received)
        model = services.model(fields.model)
        prompt = await model.tokenize(lambda: chat_prompt(fields, model.texts, model.template), received)
        return json_response(TokenCount(len(prompt.tokens)), headers=warning_headers(ignored))
