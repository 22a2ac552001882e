"""What completions and chat completions do differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.compute.models.card import ModelCard
from baton.compute.models.chat_template import ChatTemplate
from baton.compute.models.tokenizer import Tokenizer
from baton.core.errors import RequestError
from baton.serve.http.prompts import Prompt, chat_prompt, completion_prompts
from baton.serve.http.tools.use import ToolUse, tool_use
from baton.serve.http.wire.chat import ChatDialect
from baton.serve.http.wire.completions import CompletionDialect
from baton.serve.http.wire.constraint import Constraint, constraint_of
from baton.serve.http.wire.dialect import Dialect, Head
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.schemas import ChatRequest, CompletionRequest

COMPLETION_TOKENS = 16
"""OpenAI's default for max_tokens of a completion. A chat goes on to its end."""


class Ask(Protocol):
    """One request for text, read and checked as far as its own fields go."""

    @property
    def fields(self) -> CompletionRequest | ChatRequest: ...

    def prompts(self) -> Sequence[Prompt]:
        """Tokenize. Slow for long prompts, so it may run in a thread. Raises RequestError (400)."""
        ...

    def output_tokens(self) -> int | None:
        """Return how many tokens the client wants at most. None: as many as fit."""
        ...

    def constraint(self) -> Constraint | None:
        """Return what the output has to match. Raises RequestError (400)."""
        ...

    def tools(self) -> ToolUse | None:
        """Return what the model may call."""
        ...

    def dialect(self, head: Head) -> Dialect: ...


class GeneratingRoute(Protocol):
    """One way to ask for text."""

    @property
    def path(self) -> str: ...

    @property
    def id_prefix(self) -> str: ...

    @property
    def prompt_param(self) -> str:
        """The field that holds the prompt."""
        ...

    @property
    def follows_text(self) -> bool:
        """The answer goes on from the prompt's text."""
        ...

    def read(self, body: dict[str, Any]) -> Ask:
        """Check a body. Raises RequestError (400)."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionRoute:
    """`/v1/completions`: goes on from a text."""

    tokenizer: Tokenizer
    card: ModelCard
    path: str = "/v1/completions"
    id_prefix: str = "cmpl-"
    prompt_param: str = "prompt"
    follows_text: bool = True

    def read(self, body: dict[str, Any]) -> Ask:
        fields = convert(body, CompletionRequest)
        count = fields.n or 1
        if fields.best_of not in (None, count):
            message = f"best_of is {fields.best_of} and n is {count}: Baton does not rank choices, leave best_of out"
            raise RequestError(message, param="best_of")
        if fields.max_tokens == 0 and not fields.echo:
            raise RequestError("max_tokens is 0, which makes sense with echo only; send at least 1", param="max_tokens")
        return CompletionAsk(fields, self.tokenizer, self.card)


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """A completion that somebody wants."""

    fields: CompletionRequest
    tokenizer: Tokenizer
    card: ModelCard

    def prompts(self) -> Sequence[Prompt]:
        return completion_prompts(self.fields, self.tokenizer, self.card)

    def output_tokens(self) -> int | None:
        if self.fields.max_tokens is not None:
            return self.fields.max_tokens
        return max(COMPLETION_TOKENS, self.fields.min_tokens or 0)

    def constraint(self) -> Constraint | None:
        return constraint_of(self.fields)

    def tools(self) -> ToolUse | None:
        return None

    def dialect(self, head: Head) -> Dialect:
        return CompletionDialect(head, self.tokenizer, top_logprobs=self.fields.logprobs)


@dataclass(frozen=True, slots=True)
class ChatRoute:
    """`/v1/chat/completions`: answers a conversation."""

    tokenizer: Tokenizer
    template: ChatTemplate
    path: str = "/v1/chat/completions"
    id_prefix: str = "chatcmpl-"
    prompt_param: str = "messages"
    follows_text: bool = False

    def read(self, body: dict[str, Any]) -> Ask:
        fields = convert(body, ChatRequest)
        either, other = fields.max_tokens, fields.max_completion_tokens
        if either is not None and other is not None and either != other:
            message = f"max_tokens is {either} and max_completion_tokens is {other}; send one of them"
            raise RequestError(message, param="max_tokens")
        return ChatAsk(fields, self.tokenizer, self.template, tool_use(fields, self.template.source))


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """An answer in a conversation that somebody wants."""

    fields: ChatRequest
    tokenizer: Tokenizer
    template: ChatTemplate
    use: ToolUse | None

    def prompts(self) -> Sequence[Prompt]:
        return [chat_prompt(self.fields, self.tokenizer, self.template)]

    def output_tokens(self) -> int | None:
        newer = self.fields.max_completion_tokens
        return self.fields.max_tokens if newer is None else newer

    def constraint(self) -> Constraint | None:
        asked = constraint_of(self.fields)
        call = None if self.use is None else self.use.constraint(self.tokenizer)
        if asked is not None and call is not None:
            message = f"tool_choice asks for a call and {asked.param} for something else; send one of them"
            raise RequestError(message, param="tool_choice")
        return asked or call

    def tools(self) -> ToolUse | None:
        return self.use

    def dialect(self, head: Head) -> Dialect:
        return ChatDialect(head, self.tokenizer, with_logprobs=bool(self.fields.logprobs))
