"""OpenAI's Responses API over the same requests as chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.serve.http.services import Services
from baton.serve.http.stored_responses import Conversation
from baton.serve.http.text_request import ChatText, TextRequest
from baton.serve.http.tools.use import tool_use
from baton.serve.http.wire.encoders import ResponseEncoder, ResponseHead
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.response_api import ResponsesRequest, chat_messages, chat_request
from baton.serve.http.wire.response_api_encoder import ResponsesEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesText(ChatText):
    """A request to `/v1/responses`."""

    PATH = "/v1/responses"
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
