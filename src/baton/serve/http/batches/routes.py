"""The routes of files and batches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.core.errors import RequestError
from baton.core.http_config import BatchesConfig
from baton.core.limits import LimitsConfig
from baton.move.clock import unix_s
from baton.serve.http.batches.runner import BatchRunner
from baton.serve.http.batches.store import BatchStore, FileStore, Folder, StoredBatch, new_id
from baton.serve.http.budgets import Budgets
from baton.serve.http.edge import BodyLimit, context_of, read_body, read_object
from baton.serve.http.pages import file_chunks, json_response
from baton.serve.http.paging import page_of
from baton.serve.http.resume import owner_of
from baton.serve.http.wire.files import Batch, BatchRequest, FileDeleted, UploadForm
from baton.serve.http.wire.parsing import convert

FILES_PATH, BATCHES_PATH = "/v1/files", "/v1/batches"
PARTS_MAX = 16
"""Maximum parts of a form. Clients send two or three."""
PART_HEAD_BYTES_MAX = 4096
"""Bytes before the content of a part that are searched for its names."""
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,]{1,70}))')
_FIELD = re.compile(rb'[ ;]name="([^"]{0,64})"')
_EXPIRES = re.compile(r"expires_after\[(anchor|seconds)\]")
_SECONDS = re.compile(r"[0-9]{1,9}")
_FILE_NAME = re.compile(rb'[ ;]filename="([^"]{0,1024})"')


class Batches:
    """The endpoints. A client sees only what was made with keys of its own tenant."""

    def __init__(
        self, config: BatchesConfig, endpoints: Mapping[str, ASGIApp], limits: LimitsConfig, *, body_bytes_max: int
    ) -> None:
        """`endpoints`: the endpoints that batches may use, by their paths.

        `body_bytes_max`: maximum size of one request. Raises ConfigError for a bad folder.
        """
        self._file_limit = BodyLimit(config.file_bytes_max, "batches.file_bytes_max", "multipart/form-data")
        self._folder = Folder(config.folder)
        self._files = FileStore(self._folder, config)
        self._batches = BatchStore(self._folder, config.batches_max)
        self.runner = BatchRunner(config, self._files, self._batches, endpoints, Budgets(limits), body_bytes_max)

    def routes(self) -> list[Route]:
        return [
            Route(FILES_PATH, self._on_files, methods=["GET", "POST"]),
            Route(FILES_PATH + "/{id}", self._on_file, methods=["GET", "DELETE"]),
            Route(FILES_PATH + "/{id}/content", self._on_content, methods=["GET"]),
            Route(BATCHES_PATH, self._on_batches, methods=["GET", "POST"]),
            Route(BATCHES_PATH + "/{id}", self._on_batch, methods=["GET"]),
            Route(BATCHES_PATH + "/{id}/cancel", self._on_cancel, methods=["POST"]),
        ]

    async def close(self) -> None:
        """Stop all batches. A later server on the same folder goes on with them."""
        await self.runner.close()
        await asyncio.to_thread(self._folder.close)

    # ---- files

    async def _upload(self, request: Request) -> Response:
        raw = (await read_body(request.scope, request.receive, self._file_limit)).raw
        fields = await asyncio.to_thread(read_form, raw, request.headers.get("content-type", ""))
        form = _upload_form(
            {name: text.decode(errors="replace") for name, (_, text) in fields.items() if name != "file"}
        )
        if "file" not in fields:
            raise RequestError("file is required", param="file", code="missing_required_parameter")
        name, content = fields["file"]
        owner = _owner(request)
        return json_response(await asyncio.to_thread(self._files.add, owner, name, content, form))

    async def _on_files(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._upload(request)
        files = await asyncio.to_thread(self._files.list, _owner(request), request.query_params.get("purpose"))
        return json_response(page_of(files, [file.id for file in files], request))

    async def _on_file(self, request: Request) -> Response:
        if request.method != "DELETE":
            return json_response(await asyncio.to_thread(self._files.get, *_named(request)))
        await asyncio.to_thread(self._files.delete, *_named(request))
        return json_response(FileDeleted(request.path_params["id"]))

    async def _on_content(self, request: Request) -> Response:
        path = await asyncio.to_thread(self._files.content, *_named(request))
        size_bytes = path.stat().st_size
        headers = {"content-length": str(size_bytes)}
        return StreamingResponse(file_chunks(path, size_bytes), media_type="application/jsonl", headers=headers)

    # ---- batches

    async def _create(self, request: Request) -> Response:
        context = context_of(request.scope)
        body = convert(await read_object(request), BatchRequest)
        owner, identity = _owner(request), context.identity
        file = await asyncio.to_thread(self._files.get, owner, body.input_file_id)
        if file.purpose != "batch":
            message = f"the file {file.id} has the purpose {file.purpose!r}; upload it again with purpose=batch"
            raise RequestError(message, param="input_file_id")
        stored = StoredBatch(
            owner=owner,
            key=context.client,
            tenant=identity.tenant,
            cache_namespace=identity.cache_namespace,
            batch=Batch(
                id=new_id("batch"),
                endpoint=body.endpoint,
                input_file_id=body.input_file_id,
                completion_window=body.completion_window,
                created_at=unix_s(),
                metadata=body.metadata,
            ),
        )
        await asyncio.to_thread(self._batches.add, stored)
        self.runner.start(stored)
        return json_response(stored.batch)

    async def _on_batches(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._create(request)
        found = await asyncio.to_thread(self._batches.list, _owner(request))
        batches = [self.runner.state(stored).batch for stored in found]
        return json_response(page_of(batches, [batch.id for batch in batches], request))

    async def _on_batch(self, request: Request) -> Response:
        stored = await asyncio.to_thread(self._batches.get, *_named(request))
        return json_response(self.runner.state(stored).batch)

    async def _on_cancel(self, request: Request) -> Response:
        stored = await asyncio.to_thread(self._batches.get, *_named(request))
        return json_response((await self.runner.cancel(stored)).batch)


def read_form(raw: bytes, content_type: str) -> dict[str, tuple[str, bytes]]:
    """Return the fields of a multipart form: the file name (or an empty text) and the content of each.

    Raises RequestError (400). Source: RFC 7578.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise RequestError("the Content-Type has no boundary; send a multipart form")
    boundary = b"--" + (found[1] or found[2]).encode()
    _, *parts = (b"\r\n" + raw).split(b"\r\n" + boundary, PARTS_MAX + 2)
    if len(parts) > PARTS_MAX + 1:  # the end counts too
        raise RequestError(f"the multipart form has more than {PARTS_MAX} parts; send only purpose and file")
    if not parts or not parts[-1].startswith(b"--"):
        raise RequestError("the multipart form has no end; send it again")
    fields: dict[str, tuple[str, bytes]] = {}
    for part in parts[:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        head = head[:PART_HEAD_BYTES_MAX]
        name, file_name = _FIELD.search(head), _FILE_NAME.search(head)
        if name is not None:
            text = file_name[1].decode(errors="replace") if file_name is not None else ""
            fields[name[1].decode(errors="replace")] = (text, content)
    return fields


def _upload_form(fields: Mapping[str, str]) -> UploadForm:
    """Return the fields of an upload. Raises RequestError (400)."""
    values: dict[str, Any] = {name: fields[name] for name in ("purpose",) if name in fields}
    expires: dict[str, Any] = {match[1]: text for name, text in fields.items() if (match := _EXPIRES.fullmatch(name))}
    if _SECONDS.fullmatch(expires.get("seconds", "")):
        expires["seconds"] = int(expires["seconds"])
    return convert(values | ({"expires_after": expires} if expires else {}), UploadForm)


def _owner(request: Request) -> str:
    return owner_of(context_of(request.scope).identity)


def _named(request: Request) -> tuple[str, str]:
    """Return the owner name of the client, and the id in the path."""
    return _owner(request), request.path_params["id"]
