"""KV handoffs between engine servers: pass the parameters of the prefill server, or the open leg, to the decode worker.

Baton's transfers order a host's mover to offer and to pull blocks. Engine servers need no mover: vLLM's decode server
itself pulls the KV once it gets the parameters that the prefill server returned, and SGLang's has got it when the
prompt is computed. An offer therefore succeeds if the prompt is kept here, and the pull ends at once. Otherwise the
offer is refused, and the prompt is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from baton.core.types import HostId, RequestId
from baton.integrations.engines.legs import OpenLeg
from baton.integrations.engines.port import EngineServer
from baton.move.transport.port import Ticket
from baton.serve.live.copying import Copying
from baton.serve.messages.moving import (
    BlocksOffered,
    BlocksWithdrawn,
    CancelPull,
    CopyEvent,
    MoverOrder,
    MoverReady,
    OfferBlocks,
    OfferRefused,
    PullBlocks,
    PullEnded,
    WithdrawBlocks,
)

TRANSPORT = "kv_transfer_params"
"""Name of these hosts' transport. No other host has it, so none can pull from them."""
_KEPT_MAX = 4096
"""Maximum prompts whose KV waits for a decode server. The oldest are dropped: their servers free the KV in time."""


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt whose KV a prefill server keeps for a decode server."""

    host: HostId
    tokens: int
    params: dict[str, Any] | None
    """The server's `kv_transfer_params`. None: its connector finds the KV by tokens, or there is no connector."""
    leg: OpenLeg | None = None
    """The answer of the decode server that got the KV. None: no server answers yet."""


class Handoffs:
    """The prompts whose KV waits for a decode server, on all prefill servers."""

    def __init__(self) -> None:
        self._prompts: dict[RequestId, ComputedPrompt] = {}

    def keep(self, request_id: RequestId, prompt: ComputedPrompt) -> None:
        """Note that a server keeps the KV of a request's prompt."""
        self._drop(request_id)
        self._prompts[request_id] = prompt
        if len(self._prompts) > _KEPT_MAX:
            self._drop(next(iter(self._prompts)))

    def has(self, request_id: RequestId, host: HostId) -> bool:
        """Return whether this host keeps the KV of a request."""
        kept = self._prompts.get(request_id)
        return kept is not None and kept.host == host

    def take(self, request_id: RequestId, tokens: int, server: EngineServer) -> ComputedPrompt | None:
        """Remove the kept prompt of a request. Return it if it has `tokens` tokens, and this server can use it."""
        kept = self._prompts.get(request_id)
        if kept is None or kept.tokens != tokens or (kept.leg is not None and kept.leg.server is not server):
            self._drop(request_id)
            return None
        return self._prompts.pop(request_id)

    def lose_host(self, host: HostId) -> None:
        """Drop the prompts of a lost host, except for those whose KV is on a decode server already."""
        for request_id in [each for each, kept in self._prompts.items() if kept.host == host and kept.leg is None]:
            self._drop(request_id)

    def drop_ended(self, live: Container[RequestId]) -> None:
        """Drop the prompts of requests that have ended, and end the answers that no worker has read."""
        for request_id in [each for each in self._prompts if each not in live]:
            self._drop(request_id)

    def _drop(self, request_id: RequestId) -> None:
        kept = self._prompts.pop(request_id, None)
        if kept is not None and kept.leg is not None:
            kept.leg.cancel()


class EngineMover:
    """Stands in for the mover of one server's host: answers its orders. Implements `Orders` of `Copying`."""

    def __init__(self, host: HostId, handoffs: Handoffs, copying: Copying) -> None:
        self._host = host
        self._handoffs = handoffs
        self._copying = copying

    def ready(self, address: str) -> MoverReady:
        return MoverReady(pid=0, machine="", transports=(TRANSPORT,), address=address)

    def send(self, generation: int, order: MoverOrder) -> None:
        """Answer an order in the next turn of the event loop, because `Copying` expects no answer within the call."""
        event = self._event(order)
        if event is not None:
            asyncio.get_running_loop().call_soon(self._copying.mover_reported, self._host, generation, event)

    def _event(self, order: MoverOrder) -> CopyEvent | None:
        match order:
            case OfferBlocks() if self._handoffs.has(order.request_id, self._host):
                ticket = Ticket(transport=TRANSPORT, address="", epoch=0, number=order.number, secret=b"", extents=())
                return BlocksOffered(order.number, ticket)
            case OfferBlocks():
                return OfferRefused(order.number, f"{self._host} keeps no KV of this request for another server")
            case PullBlocks():
                return PullEnded(order.number, landed=True)
            case WithdrawBlocks():
                return BlocksWithdrawn(order.number)
            case CancelPull():
                return None  # a pull ends at once, so it cannot be cancelled
            case _:
                raise AssertionError(f"{self._host} has no tiers, but got {type(order).__name__}")
