"""OpenAI's Responses API over the same requests as chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.serve.http.edge import context_of
from baton.serve.http.generate import Generate
from baton.serve.http.pages import json_response
from baton.serve.http.resume import owner_of
from baton.serve.http.services import Services
from baton.serve.http.stored_responses import Conversation
from baton.serve.http.text_request import ChatText, TextRequest
from baton.serve.http.tools.use import tool_use
from baton.serve.http.wire.encoders import ResponseEncoder, ResponseHead
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.response_api import ResponsesRequest, chat_messages, chat_request
from baton.serve.http.wire.response_api_encoder import ResponsesEncoder
from baton.serve.http.wire.responses import DeletedResponse

RESPONSES_PATH = "/v1/responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesText(ChatText):
    """A request to `/v1/responses`."""

    PATH = RESPONSES_PATH
    BODY = ResponsesRequest
    ID_PREFIX = "resp_"
    PROMPT_PARAM = "input"
    CAN_RESUME = False
    SPLITS_REASONING = False

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
    """The endpoints. A client reads and deletes only responses to keys of its own tenant."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            Route(RESPONSES_PATH, Generate(self._services, ResponsesText), methods=["POST"]),
            Route(RESPONSES_PATH + "/{response}", self._stored, methods=["GET", "DELETE"]),
        ]

    async def _stored(self, request: Request) -> Response:
        stored, response_id = self._services.responses, request.path_params["response"]
        owner = owner_of(context_of(request.scope).identity)
        if request.method != "DELETE":
            return Response(stored.body(owner, response_id), media_type="application/json")
        stored.delete(owner, response_id)
        return json_response(DeletedResponse(response_id))
