"""OpenAI's Responses API over the same requests as chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.serve.http.edge import context_of, read_body
from baton.serve.http.pages import json_response
from baton.serve.http.paging import page_of
from baton.serve.http.resume import owner_of
from baton.serve.http.services import Services
from baton.serve.http.stored_responses import Conversation
from baton.serve.http.text_request import ChatText, TextRequest
from baton.serve.http.tools.use import tool_use
from baton.serve.http.unknown_fields import warning_headers
from baton.serve.http.wire.encoders import ResponseEncoder, ResponseHead
from baton.serve.http.wire.parsing import convert, parse_object
from baton.serve.http.wire.response_api import ResponsesRequest, chat_messages, chat_request
from baton.serve.http.wire.response_api_encoder import ResponsesEncoder
from baton.serve.http.wire.response_items import input_items
from baton.serve.http.wire.responses import DeletedResponse, InputTokens

RESPONSES_PATH = "/v1/responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesText(ChatText):
    """A request to `/v1/responses`."""

    PATH = RESPONSES_PATH
    BODY = ResponsesRequest
    ID_PREFIX = "resp_"
    PROMPT_PARAM = "input"
    CAN_RESUME = False

    asked: ResponsesRequest
    conversation: Conversation

    @classmethod
    def read(cls, body: dict[str, Any], services: Services, owner: str) -> TextRequest:
        asked, stored = convert(body, ResponsesRequest), services.responses
        earlier = asked.previous_response_id
        before = () if earlier is None else stored.get(owner, earlier)
        messages = (*before, *chat_messages(asked))
        conversation = Conversation(stored=stored, owner=owner, messages=messages, is_stored=asked.store is not False)
        fields = chat_request(asked, messages)
        model = services.model(fields.model)
        return cls(fields, model, tool_use(fields, model.template.source), asked=asked, conversation=conversation)

    def encoder(self, head: ResponseHead) -> ResponseEncoder:
        return ResponsesEncoder(head, self.asked, self.conversation)


class Responses:
    """The endpoints for stored responses. A client reads and deletes only responses to keys of its own tenant."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            Route(RESPONSES_PATH + "/input_tokens", self._count_tokens, methods=["POST"]),
            Route(RESPONSES_PATH + "/{response}", self._stored, methods=["GET", "DELETE"]),
            Route(RESPONSES_PATH + "/{response}/input_items", self._input_items, methods=["GET"]),
        ]

    async def _count_tokens(self, request: Request) -> Response:
        services, owner = self._services, owner_of(context_of(request.scope).identity)
        received = await read_body(request.scope, request.receive, services.body_limit)

        def read() -> tuple[TextRequest, list[str]]:
            body = parse_object(received.raw)
            return services.unknown_fields.read(
                body, ResponsesRequest, lambda known: ResponsesText.read(known, services, owner)
            )

        asked, ignored = await services.parsing.run(read, received)
        [prompt] = await asked.model.tokenize(asked.prompts, received)
        return json_response(InputTokens(input_tokens=len(prompt.tokens)), headers=warning_headers(ignored))

    async def _input_items(self, request: Request) -> Response:
        response_id = request.path_params["response"]
        messages = self._services.responses.messages(owner_of(context_of(request.scope).identity), response_id)
        items = list(input_items(messages[:-1], response_id))[::-1]
        return json_response(page_of(items, [item["id"] for item in items], request))

    async def _stored(self, request: Request) -> Response:
        stored, response_id = self._services.responses, request.path_params["response"]
        owner = owner_of(context_of(request.scope).identity)
        if request.method != "DELETE":
            return Response(stored.body(owner, response_id), media_type="application/json")
        stored.delete(owner, response_id)
        return json_response(DeletedResponse(response_id))
