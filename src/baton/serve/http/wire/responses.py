"""The bodies of responses. The OpenAPI document is generated from these structs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from baton.core.types import Role
from baton.serve.live.live_request import Timings

FINGERPRINT = f"baton-{metadata.version('baton')}"
"""Value of `system_fingerprint`: the same seed gives the same text only with the same version."""
TextFinish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AnswerMessage(Struct, frozen=True):
    content: str | None
    """None if there are tool calls and no text."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """Text of the model between `<think>` and `</think>`."""


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    token_ids: Sequence[int] | UnsetType = UNSET
    """Output tokens, if the client asked for `return_token_ids`."""


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[ChatChoice]
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    usage: Usage
    timings: Timings
    metadata: dict[str, Any] | UnsetType = UNSET
    """The client's notes, if the server keeps the chat."""


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists with one entry per token. The first prompt token of an echo has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: TextFinish
    token_ids: Sequence[int] | UnsetType = UNSET
    """Output tokens, if the client asked for `return_token_ids`."""
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings


class DeletedResponse(Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class DeletedChat(Struct, frozen=True):
    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True


class InputTokens(Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Embedding(Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or base64 text of little-endian float32 values if the client asked for base64."""


class EmbeddingUsage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    timings: Timings


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    """Maximum tokens of a request, prompt and output together."""


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """As in vLLM: clients that count tokens by `/tokenize` need no tokenizer of their own."""

    bos_token: str | None
    eos_token: str | None
    model_max_length: int


class Detokenized(Struct, frozen=True):
    prompt: str


class Health(Struct, frozen=True):
    status: str


class Version(Struct, frozen=True):
    version: str


class RoleResponse(Struct, frozen=True):
    id: str
    role: str


class RestartResponse(Struct, frozen=True):
    restarting: tuple[str, ...]
    """Workers that are still to be restarted, in this order."""


class ScaleResponse(Struct, frozen=True):
    wanted: dict[Role, int]
    """Workers that operators asked for, by role."""


class CancelResponse(Struct, frozen=True):
    cancelled: tuple[str, ...]
    """The requests, one for each choice."""


class DrainResponse(Struct, frozen=True):
    draining: str
    """The host, which leaves once its requests and prefixes are elsewhere."""
