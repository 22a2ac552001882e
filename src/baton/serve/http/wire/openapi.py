"""Generate the OpenAPI document from the structs of requests and responses."""

from __future__ import annotations

import msgspec

from baton.compute.models.card import ModelCard
from baton.serve.http.wire import responses, schemas
from baton.serve.http.wire.errors import ErrorBody
from baton.serve.http.wire.files import Batch, BatchRequest, FileDeleted, FileObject, Page
from baton.serve.http.wire.messages import CountTokensRequest, MessagesRequest, TokenCount
from baton.serve.http.wire.openapi_paths import REF, Json, content, paths, request_id_header
from baton.serve.http.wire.response_api import ResponsesRequest
from baton.serve.http.wire.schemas import EMBEDDING_INPUTS_MAX
from baton.serve.live.running import RunningRequests
from baton.serve.live.status import ClusterStatus

_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "The key lacks the scope of this route, or the Host or the Origin is not allowed.",
    404: "There is no such model, worker, host, request, log or path.",
    405: "This path does not take this method.",
    409: "The server's own host cannot be drained.",
    410: "An operator of the server cancelled the request; do not send it again.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "This client has used its share; send the request again after `Retry-After` seconds.",
    500: "The server failed on this request.",
    501: "The engine of this server's workers cannot do this.",
    503: "The cluster cannot take the request now; send it again after `Retry-After` seconds.",
    507: "The server has no room for the file; delete some.",
}
_STRICT = (
    schemas.CancelRequest,
    schemas.DrainRequest,
    schemas.RestartRequest,
    schemas.ScaleRequest,
    schemas.RoleRequest,
    schemas.ChatUpdate,
    BatchRequest,
)
"""Bodies that never may have unknown fields."""
_STRICT_NAMES = {body.__name__ for body in _STRICT}
_SCHEMAS = (
    schemas.CompletionRequest,
    schemas.ChatRequest,
    schemas.EmbeddingRequest,
    schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
    *_STRICT,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenCount,
    responses.DeletedResponse,
    responses.DeletedChat,
    responses.InputTokens,
    Batch,
    FileDeleted,
    FileObject,
    Page,
    responses.Completion,
    responses.ChatCompletion,
    responses.EmbeddingList,
    responses.ModelList,
    responses.TokenizerInfo,
    responses.Tokens,
    responses.Detokenized,
    responses.Health,
    responses.Version,
    responses.CancelResponse,
    responses.DrainResponse,
    responses.RestartResponse,
    responses.ScaleResponse,
    responses.RoleResponse,
    ClusterStatus,
    RunningRequests,
    ErrorBody,
)


def openapi_document(card: ModelCard, version: str, *, choices_max: int, is_strict: bool) -> Json:
    """Return the OpenAPI document of the server. The ranges of fields follow from the model and the settings.

    `is_strict`: the server rejects unknown fields.
    """
    _, components = msgspec.json.schema_components(_SCHEMAS, ref_template=REF)
    _narrow_tokens(components, card.vocab_tokens)
    embedding = components["EmbeddingRequest"]["properties"]
    embedding["input"] = _prompt_schema(card.vocab_tokens, EMBEDDING_INPUTS_MAX)
    embedding["dimensions"]["anyOf"][0]["maximum"] = card.embedding_dim
    _relate_fields(components, card.vocab_tokens, choices_max)
    if not is_strict:
        for name in components.keys() - _STRICT_NAMES:
            components[name].pop("additionalProperties", None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": "OpenAI-compatible API of a Baton server."},
        "paths": paths(),
        "components": {
            "schemas": components,
            "responses": {str(status): _error_response(status) for status in _ERRORS},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _error_response(status: int) -> Json:
    headers = request_id_header()
    if status in (429, 503):
        headers["Retry-After"] = {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}
    return {"description": _ERRORS[status], "content": content("ErrorBody"), "headers": headers}


def _token(vocab_tokens: int) -> Json:
    return {"type": "integer", "minimum": 0, "maximum": vocab_tokens - 1}


def _relate_fields(components: Json, vocab_tokens: int, choices_max: int) -> None:
    """Add how fields depend on each other, on the model and on the settings, which the structs cannot express."""
    completion, chat, tokenize = (components[name] for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest"))
    for request in (completion, chat):
        request["properties"]["n"]["anyOf"][0]["maximum"] = choices_max
        request["properties"]["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": _below(vocab_tokens)}
    completion["properties"]["prompt"] = _prompt_schema(vocab_tokens, choices_max)
    completion["properties"]["best_of"] = {"enum": [1, None], "default": None}
    completion["allOf"] = [
        _implies({"best_of": {"const": 1}}, _at_most("n", 1)),
        _implies({"max_tokens": {"const": 0}}, _having("echo", {"const": True})),
        *(_implies(_many_prompts(count), _at_most("n", choices_max // count)) for count in _steps(choices_max)),
    ]
    positive = {"type": "integer", "minimum": 1}
    chat["allOf"] = [_implies({"top_logprobs": positive}, _having("logprobs", {"const": True}))]
    _relate_formats(components)
    _relate_tools(components)
    texts = [_having(name, {"type": "string"}) for name in ("prompt", "content")]
    tokenize["oneOf"] = [*texts, _having("messages", {"type": "array"})]


def _relate_formats(components: Json) -> None:
    """Add that a request may have only one constraint of the output.

    A schema cannot tell a grammar from other text, so the field `grammar` and the older fields `guided_*` are left
    out. docs/api.md describes them.
    """
    named = {"type": {"const": "json_schema"}}
    components["ResponseFormat"]["if"] = {"properties": named}
    places = [_having(name, {"type": "object"}) for name in ("json_schema", "schema")]
    components["ResponseFormat"]["then"] = {"oneOf": places}
    plain = _having("schema", {"type": "object"}) | {"not": {"properties": {"type": {"const": "json_object"}}}}
    components["ResponseFormat"]["else"] = {"properties": {"json_schema": {"type": "null"}}, "not": plain}
    structured = components["StructuredOutputs"]
    del structured["properties"]["grammar"]
    structured["properties"]["json"] = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    structured["properties"]["regex"] = {
        "anyOf": [{"type": "string", "format": "regex", "minLength": 1}, {"type": "null"}]
    }
    ways = {"json": {"type": "object"}, "regex": {"type": "string"}, "choice": {"type": "array"}}
    structured["oneOf"] = [_having(name, kind) for name, kind in {**ways, "json_object": {"const": True}}.items()]
    given = {"structured_outputs": {"type": "object"}, "response_format": {"type": "object"}}
    components["ChatRequest"]["not"] = {"properties": given, "required": list(given)}
    for name in ("CompletionRequest", "ChatRequest"):
        for older in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
            del components[name]["properties"][older]
    del components["CompletionRequest"]["properties"][
        "response_format"
    ]  # OpenAI has it for chats only; Baton accepts it for completions too


def _relate_tools(components: Json) -> None:
    """Add the conditions for `tool_choice: required`, and the messages that need no content.

    A schema cannot express that a name is one of the tools. docs/api.md describes how `tool_choice` names a tool.
    """
    chat, message = components["ChatRequest"], components["ChatMessage"]
    chat["properties"]["tool_choice"] = {"enum": ["none", "auto", "required", None], "default": None}
    called = {**_having("tools", {"type": "array", "minItems": 1})}
    called["properties"]["structured_outputs"] = {"type": "null"}
    chat["allOf"].append(_implies({"tool_choice": {"const": "required"}}, called))
    calling = _having("tool_calls", {"type": "array", "minItems": 1})
    calling["properties"]["role"] = {"const": "assistant"}
    message["anyOf"] = [_having("content", {"type": ["string", "array"]}), calling]


def _implies(fields: Json, then: Json) -> Json:
    return {"if": {"properties": fields, "required": list(fields)}, "then": then}


def _at_most(name: str, most: int) -> Json:
    return {"properties": {name: {"anyOf": [{"type": "integer", "maximum": most}, {"type": "null"}]}}}


def _many_prompts(fewest: int) -> Json:
    return {"prompt": {"type": "array", "minItems": fewest, "items": {"type": ["string", "array"]}}}


def _steps(choices_max: int) -> list[int]:
    """Return the numbers of prompts at which the maximum of `n`, which is `choices_max` // prompts, gets smaller."""
    return [count for count in range(2, choices_max + 1) if choices_max // count < choices_max // (count - 1)]


def _having(name: str, schema: Json) -> Json:
    return {"properties": {name: schema}, "required": [name]}


def _below(limit: int) -> str:
    """Return a regular expression for the decimal numbers 0 to limit - 1."""
    digits = str(limit - 1)
    ways = ["0", *(f"[1-9][0-9]{{{size - 1}}}" for size in range(1, len(digits)))]
    for place, digit in enumerate(digits):
        rest = len(digits) - place - 1
        low = 1 if place == 0 else 0
        if int(digit) > low:
            ways.append(f"{digits[:place]}[{low}-{int(digit) - 1}][0-9]{{{rest}}}")
    return f"^({'|'.join([*ways, digits])})$"


def _prompt_schema(vocab_tokens: int, choices_max: int) -> Json:
    """Return a schema for the four kinds of prompt: a text, token ids, several texts, several lists of ids."""
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": _token(vocab_tokens), "minItems": 1}
    many = [{"type": "array", "items": part, "minItems": 1, "maxItems": choices_max} for part in (text, ids)]
    return {"anyOf": [text, ids, *many]}


def _narrow_tokens(schema: object, vocab_tokens: int) -> None:
    """Limit every token id in the document to the model's vocabulary."""
    match schema:
        case {"type": "integer", "maximum": 4294967295}:
            schema["maximum"] = vocab_tokens - 1
        case dict():
            for part in schema.values():
                _narrow_tokens(part, vocab_tokens)
        case list():
            for part in schema:
                _narrow_tokens(part, vocab_tokens)
