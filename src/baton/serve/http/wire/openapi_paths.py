"""The operations of the OpenAPI document: paths with their bodies, parameters and responses."""

from __future__ import annotations

from typing import Any, get_args

from baton.serve.http.wire.files import PAGE_MAX, UploadPurpose

Json = dict[str, Any]
REF = "#/components/schemas/{name}"
_READING = (401, 403, 500)
_FINDING = (401, 403, 404, 500)
_PAGE: list[Json] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": PAGE_MAX}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
_POSTING = (400, 401, 403, 404, 413, 415, 429, 500, 503)


def paths() -> Json:
    """Return the operations by their paths."""
    return {
        **_conversation_paths(),
        **_file_paths(),
        "/v1/completions": {"post": _generating("Complete a text", "CompletionRequest", "Completion")},
        "/v1/embeddings": {
            "post": _post("Turn texts into vectors", "EmbeddingRequest", "EmbeddingList", (*_POSTING, 501))
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


def _conversation_paths() -> Json:
    return {
        "/v1/chat/completions": {
            "get": _get("List the chats that the server keeps", "Page", (400, *_READING), _PAGE),
            "post": _generating("Answer a conversation", "ChatRequest", "ChatCompletion"),
        },
        "/v1/chat/completions/{chat}": {
            "get": _get("Read a chat that the server keeps", "ChatCompletion", _FINDING),
            "post": _post("Replace the metadata of a chat", "ChatUpdate", "ChatCompletion"),
            "delete": _get("Delete a chat that the server keeps", "DeletedChat", _FINDING),
            "parameters": _path_parameter("chat"),
        },
        "/v1/chat/completions/{chat}/messages": {
            "get": _get("List the messages of a chat", "Page", (400, *_FINDING), _PAGE),
            "parameters": _path_parameter("chat"),
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
    body = {"required": True, "content": content(request)}
    return {"summary": summary, "requestBody": body, "responses": _responses(content(response), errors)}


def _uploading(summary: str) -> Json:
    fields: Json = {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": list(get_args(UploadPurpose))},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    }
    form = {"schema": {"type": "object", "properties": fields, "required": ["file", "purpose"]}}
    body = {"required": True, "content": {"multipart/form-data": form}}
    return {"summary": summary, "requestBody": body, "responses": _responses(content("FileObject"), (*_POSTING, 507))}


def _get(summary: str, response: str, errors: tuple[int, ...] = _READING, parameters: list[Json] | None = None) -> Json:
    operation = {"summary": summary, "responses": _responses(content(response), errors)}
    return operation | ({"parameters": parameters} if parameters else {})


def _get_text(summary: str, media_type: str, errors: tuple[int, ...] = _READING) -> Json:
    return {"summary": summary, "responses": _responses({media_type: {"schema": {"type": "string"}}}, errors)}


def _get_events(summary: str) -> Json:
    return {"summary": summary, "responses": _responses({"text/event-stream": {"schema": _event()}}, (*_READING, 503))}


def _get_any(summary: str, errors: tuple[int, ...] = _READING) -> Json:
    return {"summary": summary, "responses": _responses({"application/json": {"schema": {"type": "object"}}}, errors)}


def content(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": REF.format(name=name)}}}


def _responses(content: Json, errors: tuple[int, ...]) -> Json:
    described: Json = {"200": {"description": "Done.", "content": content, "headers": request_id_header()}}
    for status in sorted({*errors, 405}):
        described[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return described


def request_id_header() -> Json:
    return {"X-Request-Id": {"description": "The client's own, or a new one.", "schema": {"type": "string"}}}


def _path_parameter(name: str) -> list[Json]:
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]


def _event() -> Json:  # its data is a chunk as JSON, or [DONE]
    return {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
