"""Limit what each client uses: memory of request bodies, the event loop, requests and tokens per minute."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import OrderedDict

from baton.core.errors import RequestError
from baton.core.keys import KeyLimits
from baton.core.limits import LimitsConfig
from baton.serve.http.body_threads import Turns
from baton.serve.http.wire.errors import RETRY_AFTER_S, ClusterError

CLIENTS_MAX = 65_536
"""Maximum number of remembered clients. The client that was seen longest ago is forgotten first."""
_MINUTE_S = 60.0


class RateLimit:
    """A token bucket. It refills at a constant rate, up to the amount of one minute; its amount may become negative."""

    __slots__ = ("_amount", "_at_s", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._amount = float(per_minute)
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the bucket holds at least 1. 0: it holds 1 now."""
        self._refill(now_s)
        return max(0.0, (1.0 - self._amount) * _MINUTE_S / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount, even if the bucket holds less and becomes negative."""
        self._refill(now_s)
        self._amount -= amount

    def _refill(self, now_s: float) -> None:
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        self._amount = min(self.per_minute, self._amount + elapsed_s * self.per_minute / _MINUTE_S)


class _Client:
    """The usage of one client."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = 0
        self.body_bytes = 0
        self.own: KeyLimits | None = None
        """Limits of its key at the last `set_limits`."""
        self.requests_max = 0
        self.request_rate: RateLimit | None = None
        self.token_rate: RateLimit | None = None

    def set_limits(self, own: KeyLimits, common: LimitsConfig, now_s: float) -> None:
        """Set the limits of its key, and the common ones where it has none.

        A bucket with an unchanged rate keeps its amount.
        """
        self.own = own
        self.requests_max = own.streams_max or common.client_requests_max
        requests, tokens = own.requests_per_minute, own.tokens_per_minute
        self.request_rate = _rate(self.request_rate, requests or common.client_requests_per_minute, now_s)
        self.token_rate = _rate(self.token_rate, tokens or common.client_tokens_per_minute, now_s)


class Budgets:
    """The usage of all clients. A client is an API key, or an address if the request has no key."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._numbers = itertools.count(1)
        self._body_bytes = 0
        """Bytes of request bodies in memory, of all clients."""
        self._turns = Turns()

    def begin(self, name: str, limits: KeyLimits, *, is_counted: bool, now_s: float) -> RequestBudget:
        """Return the budget of a new request. Raises ClusterError (429) if its client exceeds a limit.

        `limits`: limits of the client's key. `is_counted`: whether limits of requests and tokens apply too.
        """
        client = self._client(name)
        if is_counted:
            self._admit(client, limits, now_s)
        return RequestBudget(self, client, is_counted=is_counted)

    def _admit(self, client: _Client, own: KeyLimits, now_s: float) -> None:
        """Count a new request. Raises ClusterError (429) if the client has too many in progress or per minute."""
        if client.own is not own:
            client.set_limits(own, self._limits, now_s)
        if client.requests >= client.requests_max:
            why = f"{client.requests} requests of this client are in progress, at most {client.requests_max} may be"
            raise _refused(why, "client_requests_max", RETRY_AFTER_S)
        requests, tokens = client.request_rate, client.token_rate
        if requests is not None and (wait_s := requests.wait_s(now_s)):
            why = f"this client may send {requests.per_minute} requests a minute"
            raise _refused(why, "client_requests_per_minute", wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(now_s)):
            why = f"this client may use {tokens.per_minute} tokens a minute"
            raise _refused(why, "client_tokens_per_minute", wait_s)
        if requests is not None:
            requests.take(1, now_s)
        client.requests += 1

    def take_bytes(self, client: _Client, size: int, *, body_bytes: int) -> None:
        """Reserve memory for a part of a body. Raises ClusterError (429: the client's limit, 503: the server's).

        `body_bytes`: size of the body with this part. Raises RequestError (413) if it alone exceeds a limit.
        """
        own_max, all_max = self._limits.client_body_bytes_max, self._limits.body_bytes_max
        if body_bytes > (bytes_max := min(own_max, all_max)):
            setting = "client_body_bytes_max" if bytes_max == own_max else "body_bytes_max"
            message = f"the body has {body_bytes} bytes or more, at most {bytes_max} are allowed (limits.{setting})"
            raise RequestError(f"{message}; send a smaller one", status=413, code="body_too_large")
        if client.body_bytes + size > own_max:
            why = (
                f"the request bodies of this client take {client.body_bytes} bytes of memory, at most {own_max} may be"
            )
            raise _refused(why, "client_body_bytes_max", RETRY_AFTER_S)
        if self._body_bytes + size > all_max:
            raise ClusterError(
                f"request bodies take {self._body_bytes} bytes of memory, at most {all_max} may be"
                " (limits.body_bytes_max); send the request again later",
                status=503,
                code="body_memory_full",
                retry_after_s=RETRY_AFTER_S,
            )
        client.body_bytes += size
        self._body_bytes += size

    async def take_turn(self, client: _Client) -> None:
        """Wait until the event loop has time for a request: one begins in each round, client by client.

        It is parsed and tokenized at once after its turn, while other streams wait.
        """
        if not self._turns.take_free():
            await self._turns.take(client.number)
        asyncio.get_running_loop().call_soon(self._turns.pass_on)

    def give_bytes(self, client: _Client, size: int) -> None:
        """Release reserved memory."""
        client.body_bytes -= size
        self._body_bytes -= size

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(next(self._numbers))
            if len(self._clients) > CLIENTS_MAX:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(name)
        return client


class RequestBudget:
    """The reservations of one HTTP request."""

    __slots__ = ("_body_bytes", "_budgets", "_client", "_is_counted")

    def __init__(self, budgets: Budgets, client: _Client, *, is_counted: bool) -> None:
        self._budgets = budgets
        self._client = client
        self._is_counted = is_counted
        self._body_bytes = 0

    @property
    def client_number(self) -> int:
        """Number of the client. It can be shown, because it reveals neither the key nor the address."""
        return self._client.number

    def take_bytes(self, size: int) -> None:
        """Reserve memory for a part of the body. Raises RequestError (413), ClusterError (429, 503)."""
        self._budgets.take_bytes(self._client, size, body_bytes=self._body_bytes + size)
        self._body_bytes += size

    async def take_turn(self) -> None:
        """Wait until the event loop has time for this request. Clients take turns."""
        await self._budgets.take_turn(self._client)

    def release_body(self) -> None:
        """Release the memory of the body. Call it when the body was parsed and dropped."""
        if self._body_bytes:
            self._budgets.give_bytes(self._client, self._body_bytes)
            self._body_bytes = 0

    def charge(self, tokens: int, now_s: float) -> None:
        """Count `tokens` towards the client's limit of tokens per minute."""
        if self._client.token_rate is not None:
            self._client.token_rate.take(tokens, now_s)

    def end(self) -> None:
        """Release all reservations. Call it at the end of the response."""
        self.release_body()
        if self._is_counted:
            self._is_counted = False
            self._client.requests -= 1


def _rate(rate: RateLimit | None, per_minute: int, now_s: float) -> RateLimit | None:
    if not per_minute:
        return None
    return rate if rate is not None and rate.per_minute == per_minute else RateLimit(per_minute, now_s)


def _refused(why: str, setting: str, wait_s: float) -> ClusterError:
    message = f"{why} (limits.{setting}, or the limits of its key); send the request again in {math.ceil(wait_s)} s"
    return ClusterError(message, status=429, code="rate_limit_exceeded", retry_after_s=wait_s)
