"""Turn the prompts of a body into tokens, block hashes and requests to the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.models.chat_template import ChatInput, ChatTemplate
from baton.compute.models.tokenizer import StreamDecoder, Tokenizer
from baton.core.errors import RequestError
from baton.core.types import BlockHash, Request, RequestId, Sampling, ServiceClass, Slo
from baton.decide.kv.hashing import block_hash, block_hashes, root_hash
from baton.decide.policy.classes import OFFLINE_PRIORITY
from baton.serve.http.edge import RequestContext
from baton.serve.http.tools.formats import format_of
from baton.serve.http.tools.prompt import template_messages, tool_dicts
from baton.serve.http.wire.sampling import check_tokens
from baton.serve.http.wire.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateFields,
    TokenizeRequest,
)

_UNKNOWN = BlockHash(b"")
USER_CHARS_MAX = 128
"""Length of the longest `user` that names a tenant as it is."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of a prompt, to be sent before its completion because the client asked for `echo`."""

    text: str
    offsets: Sequence[int] = ()
    """Position in the text at which each token begins, in characters. Empty: no log probabilities were asked for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a request."""

    tokens: list[int]
    text: str | None
    """The client's text. None if it sent token ids."""
    hashes: tuple[BlockHash, ...] = ()
    whole_hash: BlockHash = _UNKNOWN
    """Hash of the whole prompt."""
    echo: Echo | None = None


class PublicPrefixes:
    """Texts whose cached blocks all tenants share, if a prompt begins with one."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Tokenize each text as the beginning of a completion, and as the system message of a chat."""
        self._prefixes: list[list[int]] = []
        for text in texts:
            self._prefixes += [tokenizer.encode(text, add_special=special) for special in (False, True)]
            try:
                chat = template.render(ChatInput([{"role": "system", "content": text}], add_generation_prompt=False))
            except RequestError:
                continue  # the template rejects a conversation of only a system message
            self._prefixes.append(tokenizer.encode(chat, add_special=False))

    def shared_tokens(self, prompt: Sequence[int]) -> int:
        """Return the length of the longest common beginning of a prompt and a public prefix, in tokens."""
        return max((_equal_tokens(prefix, prompt) for prefix in self._prefixes), default=0)


def _equal_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """The length limit of a prompt, and the parameters of its block hashes."""

    request_tokens_max: int
    block_tokens: int
    cache_salt: str
    public: PublicPrefixes | None
    """Prefixes whose blocks requests share despite different salts. None: there are no such prefixes."""
    param: str
    """The field with the prompt, for error messages."""

    def check(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its block hashes. Raises RequestError (400) if it is empty or too long."""
        count = len(prompt.tokens)
        if count == 0:
            raise RequestError("the prompt is empty: it has 0 tokens, at least 1 is needed", param=self.param)
        if count >= self.request_tokens_max:
            raise _too_long(f"{count} tokens", self.request_tokens_max, self.param)
        hashes = block_hashes(
            prompt.tokens,
            block_tokens=self.block_tokens,
            cache_salt=self.cache_salt,
            public_tokens=0 if self.public is None else self.public.shared_tokens(prompt.tokens),
        )
        parent = hashes[-1] if hashes else root_hash(self.cache_salt)
        tail = prompt.tokens[len(hashes) * self.block_tokens :]
        return replace(prompt, hashes=hashes, whole_hash=block_hash(parent, tail))


def _too_long(size: str, request_tokens_max: int, param: str) -> RequestError:
    return RequestError(
        f"the prompt has {size}, at most {request_tokens_max - 1} tokens fit: prompt and answer together may have "
        f"{request_tokens_max} (the least of context_tokens and what kv.bytes and kv.spill hold); shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Tokenizes texts, unless they are certainly too long, because that takes up to 1 KB of memory per byte."""

    tokenizer: Tokenizer
    request_tokens_max: int
    vocab_tokens: int
    """Rows of the model's embedding table. A tokenizer may have further tokens."""

    def encode(self, text: str, param: str, *, add_special: bool) -> list[int]:
        """Return the tokens of a text.

        Raises RequestError (400), with the field `param`, if it is too long or the model has no embedding of a token.
        """
        longest = self.tokenizer.token_chars_max
        if longest is not None and len(text) > longest * self.request_tokens_max:
            size = f"{len(text)} characters, and a token has at most {longest}"
            raise _too_long(size, self.request_tokens_max, param)
        tokens = self.tokenizer.encode(text, add_special=add_special)
        if tokens and (highest := max(tokens)) >= self.vocab_tokens:
            token_text = self.tokenizer.token_text(highest)
            message = f"the text has the token {token_text!r}, for which the model has no embedding; leave it out"
            raise RequestError(message, param=param)
        return tokens


def prompts_count(value: str | Sequence[Any]) -> int:
    """Return the number of prompts in a field that holds one or several, each as text or as token ids."""
    is_one = isinstance(value, str) or not value or isinstance(value[0], int)
    return 1 if is_one else len(value)


def completion_prompts(body: CompletionRequest, texts: TextEncoder, card: ModelCard) -> list[Prompt]:
    """Tokenize the prompt field of a completion: one text, one list of ids, or several. Raises RequestError (400).

    The echo is built here, once for all choices of a prompt, because it is slow for long prompts.
    """
    reader = PromptReader(texts=texts, card=card, param="prompt", add_special=body.add_special_tokens is not False)
    prompts = reader.read(body.prompt)
    if not body.echo:
        return prompts
    with_offsets = body.logprobs is not None
    return [replace(prompt, echo=_echo(prompt, texts.tokenizer, with_offsets=with_offsets)) for prompt in prompts]


def _echo(prompt: Prompt, tokenizer: Tokenizer, *, with_offsets: bool) -> Echo:
    text = prompt.text if prompt.text is not None else tokenizer.decode(prompt.tokens)
    if not with_offsets:
        return Echo(text)
    decoder = StreamDecoder(tokenizer)
    lengths = [len(decoder.push(token)) for token in prompt.tokens]
    return Echo(text, list(accumulate(lengths[:-1], initial=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Tokenizes a field that holds one or several prompts, each as text or as token ids."""

    texts: TextEncoder
    card: ModelCard
    param: str
    """The field's name, for error messages."""
    add_special: bool

    def read(self, value: str | Sequence[Any]) -> list[Prompt]:
        """Return the prompts in a field. Raises RequestError (400) if it is empty, or a token id or text is invalid."""
        match value:
            case str() as text:
                return [self._from_text(text)]
            case []:
                message = f"{self.param} is an empty list; send at least one text or token id"
                raise RequestError(message, param=self.param)
            case [int(), *_] as ids:
                return [self._from_ids(ids)]
            case many:
                return [self._one_of_many(part) for part in many]

    def _one_of_many(self, part: object) -> Prompt:
        if isinstance(part, str):
            return self._from_text(part)
        return self._from_ids(part if isinstance(part, list) else [part, None])

    def _from_text(self, text: str) -> Prompt:
        return Prompt(self.texts.encode(text, self.param, add_special=self.add_special), text)

    def _from_ids(self, ids: Sequence[Any]) -> Prompt:
        if not all(type(token) is int for token in ids):
            raise RequestError(
                f"{self.param} mixes texts and token ids; send texts, or token ids, or lists of token ids",
                param=self.param,
            )
        check_tokens(ids, self.card.vocab_tokens, self.param)
        return Prompt(list(ids), None)


def chat_prompt(body: ChatRequest | TokenizeRequest, texts: TextEncoder, template: ChatTemplate) -> Prompt:
    """Render a conversation with the chat template and tokenize it. Raises RequestError (400)."""
    start_answer = body.add_generation_prompt is not False
    messages, extra = message_dicts(body.messages or []), _template_variables(body)
    tools_disabled = isinstance(body, ChatRequest) and body.tool_choice == "none"
    tools = [] if tools_disabled else body.tools or []
    if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        form = format_of(template.source)
        messages = template_messages(messages, form, tools)
        tools = [] if form.in_prompt else tools
    tools_given = tool_dicts(tools) if tools else None
    text = template.render(ChatInput(messages, add_generation_prompt=start_answer, tools=tools_given, extra=extra))
    return Prompt(texts.encode(text, "messages", add_special=body.add_special_tokens is True), text)


def _template_variables(body: ChatRequest | TokenizeRequest) -> dict[str, Any] | None:
    """Return the further variables for the chat template. `chat_template_kwargs` takes precedence."""
    asked = body.chat_template_kwargs
    if isinstance(body, TokenizeRequest) or (body.reasoning_effort is None and body.verbosity is None):
        return asked
    given = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    thinking = {"enable_thinking": False} if body.reasoning_effort == "none" else {}
    return {**{name: value for name, value in given.items() if value is not None}, **thinking, **(asked or {})}


def message_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect: content is one text, `developer` becomes `system`."""
    written: list[dict[str, Any]] = []
    for message in messages:
        fields = msgspec.to_builtins(message)
        if isinstance(message.content, list):
            fields["content"] = "".join(part.text for part in message.content)
        if message.role == "developer":
            fields["role"] = "system"
        if not message.tool_calls:
            fields.pop("tool_calls", None)  # clients send empty lists back, for which templates may raise an error
        written.append(fields)
    return written


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes the requests to the cluster of one HTTP request."""

    context: RequestContext
    options: GenerateFields | EmbeddingRequest
    serial: int
    slo: Slo | None = None
    service: ServiceClass | None = None

    def make(
        self, index: int, prompt: Prompt, sampling: Sampling, output_tokens_max: int, *, resumed_tokens: int = 0
    ) -> Request:
        """Return request `index`. Its tenant is the tenant of the API key, or the field `user` if there are no keys."""
        return Request(
            id=RequestId(f"{self.context.request_id}-{self.serial}-{index}"),
            prompt_tokens=len(prompt.tokens),
            block_hashes=prompt.hashes,
            prompt_hash=prompt.whole_hash,
            output_tokens_max=output_tokens_max,
            arrived_at_s=self.context.arrived_at_s,
            sampling=sampling,
            slo=self.slo,
            service=self.service,
            tenant=self.context.identity.tenant or _short(self.options.user or ""),
            client=self.context.budget.client_number,
            may_wait=index > 0,
            resumed_tokens=resumed_tokens,
            priority=self._priority(),
            cache_salt=self.context.identity.cache_salt(self.options.cache_salt),
            traceparent=self.context.traceparent,
        )

    def _priority(self) -> int:
        """Return the priority that the client asks for. Raises RequestError (403) if it is too urgent for its key."""
        asked = self.context.identity.check_priority(self.options.priority or 0)
        return max(OFFLINE_PRIORITY, asked) if self.context.is_offline else asked


def _short(user: str) -> str:
    """Return the name of a user, or a digest of a long one: policies, logs and metrics keep the names of tenants."""
    return user if len(user) <= USER_CHARS_MAX else blake2b(user.encode(errors="replace"), digest_size=16).hexdigest()
