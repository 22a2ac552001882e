"""KV handoffs between vLLM servers: `kv_transfer_params` of one server for another one.

Baton's transfers order a host's mover to offer and to pull blocks. Here no mover runs: the decode server itself pulls
the KV once it gets the parameters that the prefill server returned. So an offer succeeds if there are such parameters,
and the pull ends at once. If there are none, the offer is refused, and the decode server computes the prompt.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from baton.core.types import HostId, RequestId
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
"""Name of the transport of these hosts: no other host can pull from them."""
_KEPT_MAX = 4096
"""Prompts whose KV waits for a decode server. The oldest ones are dropped: their servers free the KV by themselves."""


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt whose KV a server keeps for another one."""

    host: HostId
    tokens: int
    params: dict[str, Any] | None
    """None: the server's connector finds the KV by the tokens, or there is no connector."""


class Handoffs:
    """The prompts of all servers whose KV waits for a decode server."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[RequestId, ComputedPrompt] = OrderedDict()

    def keep(self, request_id: RequestId, prompt: ComputedPrompt) -> None:
        """Note that a server keeps the KV of a prompt."""
        self._prompts[request_id] = prompt
        self._prompts.move_to_end(request_id)
        if len(self._prompts) > _KEPT_MAX:
            self._prompts.popitem(last=False)

    def has(self, request_id: RequestId, host: HostId) -> bool:
        """Return whether this host keeps the KV of a request."""
        kept = self._prompts.get(request_id)
        return kept is not None and kept.host == host

    def take(self, request_id: RequestId, tokens: int) -> dict[str, Any] | None:
        """Return the parameters of a prompt of this length, for the one server that may use them, or None."""
        kept = self._prompts.pop(request_id, None)
        return kept.params if kept is not None and kept.tokens == tokens else None

    def lose_host(self, host: HostId) -> None:
        """Forget the prompts of a lost server."""
        for request_id in [each for each, kept in self._prompts.items() if kept.host == host]:
            del self._prompts[request_id]


class EngineMover:
    """Answers the orders to the mover of one server's host. Implements `Orders` of `Copying`."""

    def __init__(self, host: HostId, handoffs: Handoffs, copying: Copying) -> None:
        self._host = host
        self._handoffs = handoffs
        self._copying = copying

    def ready(self, address: str) -> MoverReady:
        return MoverReady(pid=0, machine="", transports=(TRANSPORT,), address=address)

    def send(self, generation: int, order: MoverOrder) -> None:
        """Answer an order in the next turn of the event loop: `Copying` awaits no answer while it sends."""
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
                return None  # every pull has ended before it could be cancelled
            case _:
                raise AssertionError(f"{self._host} has no tiers, but got {type(order).__name__}")
