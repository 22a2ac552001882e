"""`baton` whose HTTP edge checks nothing: uvicorn's own protocol, no rules for hosts and origins, no keys, no limits.

For `edge_overhead.py` only. It replaces the parts that check by ones that let everything through.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.cli.main import main
from baton.compute.models.tokenizer import Tokenizer
from baton.move.clock import now_s
from baton.serve.http import edge, generate, protocol, server
from baton.serve.http.budgets import Budgets, RequestBudget
from baton.serve.http.identity import Identity
from baton.serve.http.prompts import TextEncoder
from baton.serve.http.slo import header_slo

ANONYMOUS = Identity()


class FreeBudget(RequestBudget):
    """Reserves and counts nothing."""

    def take_bytes(self, size: int) -> None:
        pass

    def release_body(self) -> None:
        pass

    def charge(self, tokens: int, now_s: float) -> None:
        pass


async def serve_unchecked(self: edge.Edge, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request as `Edge` does, with its id, time and SLO, and without any check."""
    budgets: Budgets = self._budgets
    budget = FreeBudget(budgets, budgets._client(""), is_counted=False)
    headers, path = dict(scope["headers"]), scope["path"]
    context = edge.RequestContext(
        os.urandom(16).hex(), now_s(), ANONYMOUS, "", budget, header_slo(headers), path, headers
    )
    scope[edge._STATE_KEY] = context
    await self._app(scope, receive, send)


def encode(self: TextEncoder, text: str, param: str, *, add_special: bool) -> list[int]:
    """Tokenize a text of any length."""
    tokenizer: Tokenizer = self.tokenizer
    return tokenizer.encode(text, add_special=add_special)


def check_nothing(headers: Mapping[bytes, bytes], kind: str = "") -> None:
    """Accept every content type."""


def parse(raw: bytes) -> dict[str, Any]:
    """Return a body of any nesting."""
    return msgspec.json.decode(raw)


def start(arguments: Sequence[str]) -> int:
    """Replace the checks and run the command."""
    protocol.BoundedHttpProtocol = server.BoundedHttpProtocol = HttpToolsProtocol
    edge.Edge.__call__ = serve_unchecked
    edge.check_content_type = check_nothing
    generate.parse_object = parse
    TextEncoder.encode = encode
    return main(arguments)


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
