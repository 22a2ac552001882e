"""The differences between completions and chat completions: fields, prompts, limits, constraints, encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from msgspec import Struct

from baton.core.errors import RequestError
from baton.serve.http.model_services import ModelServices
from baton.serve.http.prompts import Prompt, chat_prompt, completion_prompts
from baton.serve.http.reasoning import CLOSING, ReasoningSplitter
from baton.serve.http.services import Services
from baton.serve.http.stored_responses import Conversation
from baton.serve.http.tools.use import ToolUse, tool_use
from baton.serve.http.wire.constraint import Constraint, constraint_of
from baton.serve.http.wire.encoders import (
    ChatEncoder,
    CompletionEncoder,
    ResponseEncoder,
    ResponseHead,
    StoredChatEncoder,
)
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.schemas import ChatRequest, CompletionRequest

COMPLETION_TOKENS = 16
"""OpenAI's default for max_tokens of a completion. A chat has no default limit."""


class TextRequest(Protocol):
    """The checked body of a request for text."""

    PATH: ClassVar[str]
    BODY: ClassVar[type[Struct]]
    """Type of the body."""
    ID_PREFIX: ClassVar[str]
    PROMPT_PARAM: ClassVar[str]
    """The field with the prompt, for error messages."""
    FOLLOWS_TEXT: ClassVar[bool]
    """Whether the output continues the prompt's text."""
    CAN_RESUME: ClassVar[bool]
    """Whether a client can resume a stream after a restart of the server."""

    @property
    def fields(self) -> CompletionRequest | ChatRequest: ...

    @property
    def model(self) -> ModelServices: ...

    @property
    def tools(self) -> ToolUse | None: ...

    @classmethod
    def read(cls, body: dict[str, Any], services: Services, owner: str) -> TextRequest:
        """Check a body, and find its model. Raises RequestError (400, 404).

        `owner`: name for the tenant of the client's key. Stored responses are found by it.
        """
        ...

    def prompts(self) -> Sequence[Prompt]:
        """Tokenize the prompts. Long prompts take long, so call it in a thread. Raises RequestError (400)."""
        ...

    def output_tokens_max(self) -> int | None:
        """Return the client's limit of output tokens. None: only the context length limits the output."""
        ...

    def constraint(self) -> Constraint | None:
        """Return the constraint of the output, or None. Raises RequestError (400) if the body has two."""
        ...

    def reasoning(self, prompt: Prompt, *, is_constrained: bool) -> ReasoningSplitter | None:
        """Return what separates the reasoning of one choice from its answer. None: they stay one text."""
        ...

    def encoder(self, head: ResponseHead) -> ResponseEncoder: ...


@dataclass(frozen=True, slots=True)
class CompletionText:
    """A request to `/v1/completions`: continue a text."""

    PATH = "/v1/completions"
    BODY = CompletionRequest
    ID_PREFIX = "cmpl-"
    PROMPT_PARAM = "prompt"
    FOLLOWS_TEXT = True
    CAN_RESUME = True

    fields: CompletionRequest
    model: ModelServices
    tools: None = None

    @classmethod
    def read(cls, body: dict[str, Any], services: Services, owner: str) -> TextRequest:
        fields = convert(body, CompletionRequest)
        count = fields.n or 1
        if fields.best_of not in (None, count):
            message = f"best_of is {fields.best_of} and n is {count}: Baton does not rank choices, leave best_of out"
            raise RequestError(message, param="best_of")
        return cls(fields, services.model(fields.model))

    def prompts(self) -> Sequence[Prompt]:
        return completion_prompts(self.fields, self.model.texts, self.model.gateway.card)

    def output_tokens_max(self) -> int | None:
        if self.fields.max_tokens is not None:
            return self.fields.max_tokens
        return max(COMPLETION_TOKENS, self.fields.min_tokens or 0)

    def constraint(self) -> Constraint | None:
        return constraint_of(self.fields)

    def reasoning(self, prompt: Prompt, *, is_constrained: bool) -> ReasoningSplitter | None:
        return None

    def encoder(self, head: ResponseHead) -> ResponseEncoder:
        return CompletionEncoder(head, self.model.tokenizer, top_logprobs=self.fields.logprobs)


@dataclass(frozen=True, slots=True)
class ChatText:
    """A request to `/v1/chat/completions`: answer a conversation."""

    PATH = "/v1/chat/completions"
    BODY: ClassVar[type[Struct]] = ChatRequest
    SPLITS_REASONING: ClassVar[bool] = True
    ID_PREFIX = "chatcmpl-"
    PROMPT_PARAM = "messages"
    FOLLOWS_TEXT = False
    CAN_RESUME = True

    fields: ChatRequest
    model: ModelServices
    tools: ToolUse | None
    conversation: Conversation | None = None
    """None: the server does not keep the chat."""

    @classmethod
    def read(cls, body: dict[str, Any], services: Services, owner: str) -> TextRequest:
        fields = convert(body, ChatRequest)
        older, newer = fields.max_tokens, fields.max_completion_tokens
        if older is not None and newer is not None and older != newer:
            message = f"max_tokens is {older} and max_completion_tokens is {newer}; send one of them"
            raise RequestError(message, param="max_tokens")
        model = services.model(fields.model)
        asked = Conversation(stored=services.chats, owner=owner, messages=tuple(fields.messages), is_stored=True)
        return cls(fields, model, tool_use(fields, model.template.source), asked if fields.store else None)

    def prompts(self) -> Sequence[Prompt]:
        return [chat_prompt(self.fields, self.model.texts, self.model.template)]

    def output_tokens_max(self) -> int | None:
        newer = self.fields.max_completion_tokens
        return self.fields.max_tokens if newer is None else newer

    def constraint(self) -> Constraint | None:
        asked = constraint_of(self.fields)
        call = None if self.tools is None else self.tools.constraint(self.model.tokenizer)
        if asked is not None and call is not None and not asked.param.startswith("response_format"):
            message = f"tool_choice asks for a call and {asked.param} for something else; send one of them"
            raise RequestError(message, param="tool_choice")
        return call or asked  # a format is that of an answer, and a forced call has none

    def reasoning(self, prompt: Prompt, *, is_constrained: bool) -> ReasoningSplitter | None:
        if not self.SPLITS_REASONING or CLOSING not in self.model.template.source:
            return None
        is_kept = self.fields.include_reasoning is not False
        return ReasoningSplitter(prompt.text or "", is_constrained=is_constrained, is_kept=is_kept)

    def encoder(self, head: ResponseHead) -> ResponseEncoder:
        with_logprobs = bool(self.fields.logprobs)
        if self.conversation is None:
            return ChatEncoder(head, self.model.tokenizer, with_logprobs=with_logprobs)
        return StoredChatEncoder(
            head,
            self.model.tokenizer,
            with_logprobs=with_logprobs,
            conversation=self.conversation,
            metadata=self.fields.metadata or {},
        )
