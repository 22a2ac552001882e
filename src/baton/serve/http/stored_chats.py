"""OpenAI's stored chat completions: list, read, change and delete the chats of clients that sent `store: true`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

from msgspec import Raw, Struct, json, to_builtins
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.serve.http.edge import context_of, read_object
from baton.serve.http.pages import json_response
from baton.serve.http.paging import page_of
from baton.serve.http.resume import owner_of
from baton.serve.http.services import Services
from baton.serve.http.text_request import ChatText
from baton.serve.http.wire.files import Page
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.responses import DeletedChat
from baton.serve.http.wire.schemas import ChatMessage, ChatUpdate

_METADATA = re.compile(r"metadata\[(.+)\]")


class _Labels(Struct):
    """The fields of a stored chat that a list is filtered by."""

    id: str
    model: str
    metadata: dict[str, Any] = {}


class StoredChats:
    """The routes of stored chats. A client can read, change and delete only chats of its own tenant."""

    def __init__(self, services: Services, create: ASGIApp) -> None:
        """`create`: the endpoint that answers a chat, at the path of the list."""
        self._chats = services.chats
        self._create = create

    def routes(self) -> list[Route]:
        path = ChatText.PATH + "/{chat}"
        return [
            Route(ChatText.PATH, self, methods=["GET", "POST"]),
            Route(path, self._stored, methods=["GET", "POST", "DELETE"]),
            Route(path + "/messages", self._messages, methods=["GET"]),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a chat (POST), or list the stored ones."""
        if scope["method"] == "POST":
            await self._create(scope, receive, send)
        else:
            page = await asyncio.to_thread(self._list, Request(scope, receive))
            await json_response(page)(scope, receive, send)

    def _list(self, request: Request) -> Page:
        query = request.query_params
        wanted = {match[1]: value for name, value in query.items() if (match := _METADATA.fullmatch(name))}
        found: list[Raw] = []
        ids: list[str] = []
        for body in self._chats.bodies(_owner(request))[::-1]:
            labels = json.decode(body, type=_Labels)
            is_wanted = all(labels.metadata.get(name) == value for name, value in wanted.items())
            if is_wanted and query.get("model", labels.model) == labels.model:
                found.append(Raw(body))
                ids.append(labels.id)
        return page_of(found, ids, request, default="asc")

    async def _stored(self, request: Request) -> Response:
        owner, chat = _owner(request), request.path_params["chat"]
        if request.method == "DELETE":
            self._chats.delete(owner, chat)
            return json_response(DeletedChat(chat))
        if request.method == "POST":
            update = convert(await read_object(request), ChatUpdate)
            fields = json.decode(self._chats.body(owner, chat), type=dict[str, Raw])
            fields["metadata"] = Raw(json.encode(update.metadata or {}))
            self._chats.change(owner, chat, json.encode(fields))
        return Response(self._chats.body(owner, chat), media_type="application/json")

    async def _messages(self, request: Request) -> Response:
        chat = request.path_params["chat"]
        messages = list(_stored_messages(self._chats.messages(_owner(request), chat), chat))[::-1]
        return json_response(page_of(messages, [message["id"] for message in messages], request, default="asc"))


def _stored_messages(messages: tuple[ChatMessage, ...], chat: str) -> Iterator[dict[str, Any]]:
    for index, message in enumerate(messages):
        fields = {"refusal": None, "name": None, **to_builtins(message), "id": f"{chat}-{index}"}
        parts = None if isinstance(message.content, str) else fields.get("content")
        yield {**fields, "content": None if parts else message.content, "content_parts": parts}


def _owner(request: Request) -> str:
    return owner_of(context_of(request.scope).identity)
