"""Generate the OpenAPI document from the structs of requests and responses."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.compute.models.card import ModelCard
from baton.serve.http.wire import responses, schemas
from baton.serve.http.wire.errors import ErrorBody
from baton.serve.http.wire.files import PAGE_MAX, Batch, BatchRequest, FileDeleted, FileObject, Page
from baton.serve.http.wire.messages import CountTokensRequest, MessagesRequest, TokenCount
from baton.serve.http.wire.response_api import ResponsesRequest
from baton.serve.http.wire.schemas import EMBEDDING_INPUTS_MAX
from baton.serve.live.running import RunningRequests
from baton.serve.live.status import ClusterStatus

Json = dict[str, Any]
_REF = "#/components/schemas/{name}"
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
_READING = (401, 403, 500)
_FINDING = (401, 403, 404, 500)
_PAGE: list[Json] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": PAGE_MAX}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
_POSTING = (400, 401, 403, 404, 413, 415, 429, 500, 503)
_STRICT = (
    schemas.DetokenizeRequest,
    schemas.CancelRequest,
    schemas.DrainRequest,
    schemas.RestartRequest,
    schemas.ScaleRequest,
    schemas.RoleRequest,
    BatchRequest,
)
"""Bodies that never may have unknown fields."""
_STRICT_NAMES = {body.__name__ for body in _STRICT}
_SCHEMAS = (
    schemas.CompletionRequest,
    schemas.ChatRequest,
    schemas.EmbeddingRequest,
    schemas.TokenizeRequest,
    *_STRICT,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenCount,
    responses.DeletedResponse,
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
    _, components = msgspec.json.schema_components(_SCHEMAS, ref_template=_REF)
    _narrow_tokens(components, card.vocab_tokens)
    embedding = components["EmbeddingRequest"]["properties"]
    embedding["input"] = _prompt_schema(card.vocab_tokens, EMBEDDING_INPUTS_MAX)
    embedding["dimensions"] = {"enum": [card.embedding_dim, None], "default": None}
    _relate_fields(components, card.vocab_tokens, choices_max)
    if not is_strict:
        for name in components.keys() - _STRICT_NAMES:
            components[name].pop("additionalProperties", None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": "OpenAI-compatible API of a Baton server."},
        "paths": _paths(),
        "components": {
            "schemas": components,
            "responses": {str(status): _error_response(status) for status in _ERRORS},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _paths() -> Json:
    return {
        **_file_paths(),
        "/v1/completions": {"post": _generating("Complete a text", "CompletionRequest", "Completion")},
        "/v1/chat/completions": {"post": _generating("Answer a conversation", "ChatRequest", "ChatCompletion")},
        "/v1/embeddings": {
            "post": _post("Turn texts into vectors", "EmbeddingRequest", "EmbeddingList", (*_POSTING, 501))
        },
        "/v1/responses": {
            "post": _generating_any("Answer a conversation, as OpenAI's Responses API", "ResponsesRequest")
        },
        "/v1/responses/{response}": {
            "get": _get_any("Read a response that the server keeps", _FINDING),
            "delete": _get("Delete a response that the server keeps", "DeletedResponse", _FINDING),
            "parameters": _path_parameter("response"),
        },
        "/v1/responses/{response}/input_items": {
            "get": _get("List the conversation before a response", "Page", (400, *_FINDING), _PAGE),
            "parameters": _path_parameter("response"),
        },
        "/v1/responses/input_tokens": {
            "post": _post("Count the tokens of an input", "ResponsesRequest", "InputTokens")
        },
        "/v1/messages": {
            "post": _generating_any("Answer a conversation, as Anthropic's Messages API", "MessagesRequest")
        },
        "/v1/messages/count_tokens": {
            "post": _post("Count the tokens of a conversation", "CountTokensRequest", "TokenCount")
        },
        "/v1/models": {"get": _get("List the model that is served", "ModelList")},
        "/v1/models/{model}": {"get": _get("Describe a model", "Model", _FINDING, _path_parameter("model"))},
        "/tokenize": {"post": _post("Turn text or a conversation into token ids", "TokenizeRequest", "Tokens")},
        "/detokenize": {"post": _post("Turn token ids into text", "DetokenizeRequest", "Detokenized")},
        "/tokenizer_info": {"get": _get("Describe the tokenizer", "TokenizerInfo", _FINDING)},
        "/health": {"get": _get("Tell whether requests can be served", "Health", (500, 503))},
        "/ready": {"get": _get("Tell whether requests can be served", "Health", (500, 503))},
        "/ping": {
            method: _get("Tell whether requests can be served", "Health", (500, 503)) for method in ("get", "post")
        },
        "/metrics": {"get": _get_text("Read the metrics for Prometheus", "text/plain")},
        "/cluster": {"get": _get("Show workers, hosts and policies", "ClusterStatus")},
        "/cluster/log": {
            "get": _get_text("Read the decision log, as far as it is written", "application/octet-stream", _FINDING)
        },
        "/cluster/scale": {"post": _post("Set the number of workers of a role", "ScaleRequest", "ScaleResponse")},
        "/cluster/restart": {"post": _post("Restart workers one after the other", "RestartRequest", "RestartResponse")},
        "/cluster/workers/{worker}/role": {
            "post": _post("Change a worker's role", "RoleRequest", "RoleResponse")
            | {"parameters": _path_parameter("worker")}
        },
        "/cluster/hosts/{host}/drain": {
            "post": _post("Ask a joined host to leave", "DrainRequest", "DrainResponse", (*_POSTING, 409))
            | {"parameters": _path_parameter("host")}
        },
        "/cluster/requests": {"get": _get("List the oldest requests that have not ended", "RunningRequests")},
        "/cluster/cancel": {"post": _post("Cancel a running request", "CancelRequest", "CancelResponse")},
        "/cluster/explain/{request}": {
            "get": _get_any("Explain the decisions about a request", (*_FINDING, 503))
            | {"parameters": _path_parameter("request")}
        },
        "/cluster/events": {"get": _get_events("Follow the figures of the dashboard, one event a second")},
        "/ui": {"get": _get_text("Open the dashboard", "text/html")},
        "/chat": {"get": _get_text("Open the chat page", "text/html")},
        "/docs": {"get": _get_text("Open the page of this document", "text/html")},
        "/openapi.json": {"get": _get_any("Read this document")},
        "/version": {"get": _get("Tell the version", "Version")},
    }


def _file_paths() -> Json:
    return {
        "/v1/files": {"get": _get("List files", "Page", (400, *_READING), _PAGE), "post": _uploading("Upload a file")},
        "/v1/files/{upload}": {
            "get": _get("Describe a file", "FileObject", _FINDING),
            "delete": _get("Delete a file", "FileDeleted", _FINDING),
            "parameters": _path_parameter("upload"),
        },
        "/v1/files/{upload}/content": {
            "get": _get_text("Read a file", "application/jsonl", _FINDING) | {"parameters": _path_parameter("upload")}
        },
        "/v1/batches": {
            "get": _get("List batches", "Page", (400, *_READING), _PAGE),
            "post": _post("Run the requests of a file", "BatchRequest", "Batch"),
        },
        "/v1/batches/{batch}": {"get": _get("Describe a batch", "Batch", _FINDING, _path_parameter("batch"))},
        "/v1/batches/{batch}/cancel": {"post": _get("Cancel a batch", "Batch", _FINDING, _path_parameter("batch"))},
    }


def _generating(summary: str, request: str, response: str) -> Json:
    operation = _post(summary, request, response, (*_POSTING, 410))
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _event()}
    return operation


def _generating_any(summary: str, request: str) -> Json:
    operation = _generating(summary, request, "ErrorBody")
    operation["responses"]["200"]["content"]["application/json"] = {"schema": {"type": "object"}}
    return operation


def _post(summary: str, request: str, response: str, errors: tuple[int, ...] = _POSTING) -> Json:
    body = {"required": True, "content": _content(request)}
    return {"summary": summary, "requestBody": body, "responses": _responses(_content(response), errors)}


def _uploading(summary: str) -> Json:
    fields = {"file": {"type": "string", "contentMediaType": "application/octet-stream"}, "purpose": {"const": "batch"}}
    form = {"schema": {"type": "object", "properties": fields, "required": list(fields)}}
    body = {"required": True, "content": {"multipart/form-data": form}}
    return {"summary": summary, "requestBody": body, "responses": _responses(_content("FileObject"), (*_POSTING, 507))}


def _get(summary: str, response: str, errors: tuple[int, ...] = _READING, parameters: list[Json] | None = None) -> Json:
    operation = {"summary": summary, "responses": _responses(_content(response), errors)}
    return operation | ({"parameters": parameters} if parameters else {})


def _get_text(summary: str, media_type: str, errors: tuple[int, ...] = _READING) -> Json:
    return {"summary": summary, "responses": _responses({media_type: {"schema": {"type": "string"}}}, errors)}


def _get_events(summary: str) -> Json:
    return {"summary": summary, "responses": _responses({"text/event-stream": {"schema": _event()}}, (*_READING, 503))}


def _get_any(summary: str, errors: tuple[int, ...] = _READING) -> Json:
    return {"summary": summary, "responses": _responses({"application/json": {"schema": {"type": "object"}}}, errors)}


def _content(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}


def _responses(content: Json, errors: tuple[int, ...]) -> Json:
    described: Json = {"200": {"description": "Done.", "content": content, "headers": _request_id_header()}}
    for status in sorted({*errors, 405}):
        described[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return described


def _error_response(status: int) -> Json:
    headers = _request_id_header()
    if status in (429, 503):
        headers["Retry-After"] = {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}
    return {"description": _ERRORS[status], "content": _content("ErrorBody"), "headers": headers}


def _request_id_header() -> Json:
    return {"X-Request-Id": {"description": "The client's own, or a new one.", "schema": {"type": "string"}}}


def _path_parameter(name: str) -> list[Json]:
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]


def _token(vocab_tokens: int) -> Json:
    return {"type": "integer", "minimum": 0, "maximum": vocab_tokens - 1}


def _event() -> Json:  # its data is a chunk as JSON, or [DONE]
    return {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


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
    tokenize["oneOf"] = [_having("prompt", {"type": "string"}), _having("messages", {"type": "array"})]


def _relate_formats(components: Json) -> None:
    """Add that a request may have only one constraint of the output.

    A schema cannot tell a grammar from other text, so the field `grammar` and the older fields `guided_*` are left
    out. docs/api.md describes them.
    """
    named = {"type": {"const": "json_schema"}}
    components["ResponseFormat"]["if"] = {"properties": named}
    components["ResponseFormat"]["then"] = _having("json_schema", {"type": "object"})
    components["ResponseFormat"]["else"] = {"properties": {"json_schema": {"type": "null"}}}
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
