"""The requests that have not ended, for an operator who looks for one to cancel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Literal

from msgspec import Struct

from baton.core.types import RequestId
from baton.serve.live.live_request import LiveRequest

SHOWN_MAX = 50
"""Requests that one view shows, the oldest first."""
_CHOICE = re.compile(r"-\d+-\d+")
"""End of the id of a choice, after the id of its HTTP request."""
Phase = Literal["queued", "prefill", "decode"]


class RunningRequest(Struct, frozen=True, kw_only=True):
    """A request that has not ended."""

    id: str
    phase: Phase
    worker: str
    """Empty: no worker has it yet, or its worker was lost."""
    age_s: float
    """Time since its arrival."""
    tenant: str
    service: str
    """Name of its service class. Empty: it has none."""
    prompt_tokens: int
    output_tokens: int
    output_tokens_max: int


class RunningRequests(Struct, frozen=True, kw_only=True):
    """The oldest requests that have not ended."""

    total: int
    requests: tuple[RunningRequest, ...]


def describe_running(live: Mapping[RequestId, LiveRequest], now_s: float) -> RunningRequests:
    """Return the number of live requests and the oldest of them."""
    oldest = islice(live.values(), SHOWN_MAX)  # a dict keeps the order of arrival
    return RunningRequests(total=len(live), requests=tuple(_running(one, now_s) for one in oldest))


def find_live(live: Mapping[RequestId, LiveRequest], asked: str) -> list[LiveRequest]:
    """Return the live requests with this id. The X-Request-Id of a client matches all choices of its request."""
    # A pattern of an id of 1 MB takes seconds to compile, so the fixed pattern starts behind the id.
    return [
        one
        for name, one in live.items()
        if name == asked or (name.startswith(asked) and _CHOICE.fullmatch(name, len(asked)))
    ]


def _running(live: LiveRequest, now_s: float) -> RunningRequest:
    request = live.request
    phase: Phase = "queued" if live.stamps.started_s is None else "decode" if live.output_tokens else "prefill"
    return RunningRequest(
        id=request.id,
        phase=phase,
        worker=live.worker or "",
        age_s=max(0.0, now_s - request.arrived_at_s),
        tenant=request.tenant,
        service=request.service.name if request.service is not None else "",
        prompt_tokens=request.prompt_tokens,
        output_tokens=live.output_tokens,
        output_tokens_max=request.output_tokens_max,
    )
