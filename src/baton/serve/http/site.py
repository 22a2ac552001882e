"""The web pages: the dashboard, the chat, the API's documentation, and the files that they load."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.core.errors import RequestError

STATIC = "/static/"
"""Prefix of the paths of the pages' files. They need no API key."""
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of a page: only scripts and styles from this server's files, none inline."""
_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


class Site:
    """The routes of the pages. The constructor reads all files."""

    def __init__(self) -> None:
        folder = resources.files("baton.serve.http").joinpath("site")
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if _kind(file.name) in _TYPES}

    def routes(self) -> list[Route]:
        return [
            Route("/", self._dashboard),
            Route("/ui", self._dashboard),
            Route("/chat", self._chat),
            Route("/docs", self._docs),
            Route(STATIC + "{name}", self._static),
            Route("/favicon.ico", self._no_icon),
        ]

    async def _dashboard(self, request: Request) -> Response:
        return self._file("index.html")

    async def _chat(self, request: Request) -> Response:
        return self._file("chat.html")

    async def _docs(self, request: Request) -> Response:
        return self._file("docs.html")

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files or _kind(name) == "html":
            raise RequestError(f"there is no file {name[:80]!r}", status=404, code="not_found")
        return self._file(name)

    def _file(self, name: str) -> Response:
        headers = {"content-type": _TYPES[_kind(name)], "content-security-policy": PAGE_POLICY}
        return Response(self._files[name], headers={**headers, "cache-control": "no-cache"})

    async def _no_icon(self, request: Request) -> Response:
        """Respond with 204: browsers ask for an icon, and would show a 404 as an error in their console."""
        return Response(status_code=204)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
