"""The bodies of requests. Their types define the accepted ranges; the OpenAPI document is generated from them.

A field that Baton does not implement accepts only values that change nothing. Fields under "no effect" are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from baton.core.config import WORKERS_MAX
from baton.core.types import Role

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
BadWord = Annotated[str, Meta(min_length=1, max_length=64)]
EmptyText = Annotated[str, Meta(max_length=0)]
EmptyList = Annotated[list[Any], Meta(max_length=0)]
Prompt = Annotated[
    str | list[str | TokenId | list[TokenId]],
    Meta(extra={"words": "text, a list of token ids, a list of texts or a list of lists of token ids"}),
]
EMBEDDING_INPUTS_MAX = 2048
"""Maximum prompts of one embedding request, as in OpenAI's API."""


# ---- constraints of the output: OpenAI's `response_format`, vLLM's `structured_outputs`

GrammarText = Annotated[str, Meta(min_length=1, max_length=65536)]
ChoiceList = Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1024)]
JsonSchema = dict[str, Any]


class NamedSchema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: JsonSchema | None = None
    """None: any JSON object."""
    description: str | None = None
    """No effect."""
    strict: bool | None = None
    """No effect, because a schema is always followed."""


class ResponseFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    """Required if `type` is `json_schema` and there is no `schema`, else forbidden."""
    schema: JsonSchema | None = None
    """The schema, in llama.cpp's form of `json_object` and `json_schema`."""


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of these. `json` may be a schema or the text of one; `grammar` is Lark or GBNF."""

    json: JsonSchema | GrammarText | None = None
    regex: GrammarText | None = None
    choice: ChoiceList | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


# ---- tools

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    """Schema of the arguments. None: the function has no arguments."""
    strict: bool | None = None
    """No effect: arguments follow the schema if a call is required, and are free otherwise."""


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tool that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """A JSON object, as text."""


class MessageToolCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """No effect. Streams have it, and clients send it back."""


ToolList = Annotated[list[Tool], Meta(max_length=128)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


# ---- bodies


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """Send a last chunk with the usage."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk has the usage so far."""
    include_obfuscation: bool | None = None
    """No effect."""


SLO_S_MAX = 86_400.0
"""Maximum latency target of a request: a day."""
SloSeconds = Annotated[float, Meta(gt=0, le=SLO_S_MAX)]


class SloFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency targets of this request. The server rejects the request at once if it is likely enough to miss one."""

    ttft_s: SloSeconds | None = None
    tpot_s: SloSeconds | None = None


class GenerateFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 keep every token."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=1024),
        ]
        | None
    ) = None
    """Numbers to add to the logits of tokens, by token id (as text)."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=64)] | None = None
    """Words that the output must not have."""
    include_stop_str_in_output: bool | None = None
    """The text ends with the stop string that it reached."""
    skip_special_tokens: bool | None = None
    """False: special tokens are part of the text."""
    return_token_ids: bool | None = None
    """Return the ids of the prompt's and the output's tokens."""
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Stop tokens and strings are ignored before this number of tokens. A smaller `max_tokens` takes precedence."""
    ignore_eos: bool | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Requests with a lower number are served earlier."""
    slo: SloFields | None = None
    """The headers `x-slo-ttft-ms` and `x-slo-tpot-ms` have the same effect. Default: the server's `slo`."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's special tokens (beginning of text) before the prompt. Default: true, for chats false."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: ChoiceList | None = None
    guided_grammar: GrammarText | None = None

    metadata: dict[str, Any] | None = None
    """Notes of the client, which are stored with a chat."""
    store: bool | None = None
    """Keep the chat, so that clients read it by its id. No effect on completions."""

    # no effect
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    spaces_between_special_tokens: bool | None = None


class CompletionRequest(GenerateFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: EmptyText | None = None


class TextPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)] | None = None
    """Optional only in an assistant's message with tool calls."""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None

    # clients send these fields of responses back, with empty values
    refusal: str | None = None
    annotations: list[Any] | None = None
    function_call: None = None
    audio: None = None


class ChatUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    metadata: Annotated[dict[str, Any], Meta(max_length=16)] | None


class ChatRequest(GenerateFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """0: only put the prompt into the cache."""
    max_completion_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, such as Qwen3's `enable_thinking`."""
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    """A variable of the chat template. `none` sets `enable_thinking` to false besides."""
    verbosity: Annotated[str, Meta(max_length=64)] | None = None
    """A variable of the chat template."""
    include_reasoning: bool | None = None
    """False: leave the text between `<think>` and `</think>` out, which otherwise is `reasoning_content`."""
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    """Default: `auto`."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""

    # not implemented: accepted only with a value that changes nothing
    functions: EmptyList | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None


class EmbeddingRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    """base64: float32 values, little-endian."""
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Length of the vectors, at most the model's own: their first values, scaled to length 1."""
    user: str | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Requests with a lower number are served earlier."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's special tokens around every text. Default: true."""


class TokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `prompt`, `content` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    """llama.cpp's name for `prompt`."""
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolList | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None


class RestartRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: tuple[str, ...] = ()


class ScaleRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role
    workers: Annotated[int, Meta(ge=1, le=WORKERS_MAX)] | None
    """Workers of this role, from the next tick on. Null: the scaling policy decides again."""


class CancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    """Of the request, or the client's X-Request-Id."""


class DrainRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    restart: bool = False
    """The host's agent starts its program again and joins again, instead of ending."""


class RoleRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role


UNSUPPORTED = {
    "suffix": "Baton does not fill in the middle",
    "background": "send a batch to /v1/batches, or stream the answer",
    "truncation": "leave out the oldest messages",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": "Baton answers with text only",
    "audio": "Baton answers with text only",
    "prediction": "Baton takes no predicted output",
    "web_search_options": "Baton does not search the web",
    "guided_whitespace_pattern": "Baton bounds the white space in JSON by itself",
    "whitespace_pattern": "Baton bounds the white space in JSON by itself",
    "structural_tag": "use tools, or structured_outputs.grammar",
    "guided_decoding_backend": "Baton has one grammar library",
    "use_beam_search": "Baton samples; it does not search beams",
    "length_penalty": "Baton samples; it does not search beams",
    "prompt_logprobs": "use echo with logprobs on /v1/completions",
    "prompt_embeds": "Baton takes prompts as text or token ids",
    "truncate_prompt_tokens": "Baton does not truncate prompts",
    "allowed_token_ids": "use logit_bias",
    "continue_final_message": "Baton starts a new message",
    "chat_template": "the model's own chat template is used",
    "documents": "put the documents into the messages",
    "mm_processor_kwargs": "Baton takes text only",
    "kv_transfer_params": "Baton decides where KV goes",
    "bootstrap_host": "Baton decides where KV goes",
    "bootstrap_port": "Baton decides where KV goes",
    "bootstrap_room": "Baton decides where KV goes",
    "bootstrap_pair_key": "Baton decides where KV goes",
    "disagg_prefill_dp_rank": "Baton decides where KV goes",
    "routed_dp_rank": "Baton decides where KV goes",
}
"""Fields of other servers' APIs that Baton rejects, because ignoring them would change the response, with a hint."""
