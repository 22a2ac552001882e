"""Pagination of lists, with the query parameters of OpenAI's API: `limit`, `after` and `order`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from starlette.requests import Request

from baton.core.errors import RequestError
from baton.serve.http.wire.files import PAGE_MAX, Page


def page_of(
    found: Sequence[Any], ids: Sequence[str], request: Request, *, default: Literal["asc", "desc"] = "desc"
) -> Page:
    """Return the part of a list, the newest first, that the query asks for, as in `?limit=20&after=ID&order=asc`.

    `ids`: one for each element. `default`: the order if the query names none. Raises RequestError (400).
    """
    limit, after = asked_count(request, "limit", 20, PAGE_MAX), request.query_params.get("after")
    order = request.query_params.get("order", default)
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {order[:60]!r}", param="order")
    if order == "asc":
        found, ids = found[::-1], ids[::-1]
    start = ids.index(after) + 1 if after in ids else 0
    shown, shown_ids = found[start : start + limit], ids[start : start + limit]
    return Page(
        data=list(shown),
        first_id=shown_ids[0] if shown_ids else None,
        last_id=shown_ids[-1] if shown_ids else None,
        has_more=start + len(shown) < len(found),
    )


def asked_count(request: Request, name: str, default: int, most: int) -> int:
    """Return the integer from 0 to `most` that a parameter of the query gives. Raises RequestError (400)."""
    asked = request.query_params.get(name, str(default))
    if not (asked.isascii() and asked.isdecimal() and len(asked) <= 10 and int(asked) <= most):
        raise RequestError(f"{name} must be an integer from 0 to {most}, got {asked[:60]!r}", param=name)
    return int(asked)
