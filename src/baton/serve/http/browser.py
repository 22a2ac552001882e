"""Reject requests from foreign web pages, which can make a user's browser send requests to this server."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from baton.core.errors import RequestError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing. A foreign page may send them, but cannot read the response."""
ANY = "*"
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_SINGLE_HEADERS = frozenset({b"host", b"origin", b"authorization", b"x-api-key", b"content-type"})
_REMEMBERED_MAX = 64
"""Allowed values of Host that are remembered: clients send few, and each is parsed once."""


class BrowserRules:
    """Checks the headers Host and Origin of requests.

    A page whose DNS name points to this machine (DNS rebinding) sends that name as Host. A page of another server
    sends its own Origin with every request that may change something.
    """

    def __init__(self, *, bound_host: str, hosts: Iterable[str] = (), origins: Collection[str] = ()) -> None:
        """`bound_host`: address the server listens on. `hosts`: its further names. `origins`: allowed origins."""
        names = {_host_name(host) for host in hosts}
        self._takes_any_host = ANY in names
        self._takes_addresses = _is_wildcard(bound_host)
        own_names = {socket.gethostname()} if self._takes_addresses else set[str]()
        self._hosts = LOOPBACK_NAMES | {_host_name(name) for name in (bound_host, *own_names)} | names
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._allowed = {b""}
        """Values of Host that were allowed before."""

    def check(self, method: str, headers: Sequence[tuple[bytes, bytes]], by_name: Mapping[bytes, bytes]) -> None:
        """Raise RequestError (403) for a foreign Host, or for a foreign Origin of a request that may change state.

        `by_name`: the last of the headers with each name.
        """
        if len(by_name) < len(headers):
            _check_single(headers)
        sent = by_name.get(b"host", b"")
        if sent not in self._allowed:
            self._check_host(sent)
        if b"origin" not in by_name or method in SAFE_METHODS:
            return
        origin = by_name[b"origin"].decode("latin-1").strip().lower()
        if origin and not self._takes_origin(origin, _text(sent)):
            raise RequestError(
                f"pages of the origin {origin[:80]!r} may not use this server; start it with "
                f"--cors-origin {origin[:80]} to allow them",
                status=403,
                code="origin_not_allowed",
            )

    def _check_host(self, sent: bytes) -> None:
        """Raise RequestError (403) for a foreign Host, and remember an allowed one."""
        name = _host_name(host := _text(sent))
        if host and not self._takes_host(name):
            raise RequestError(
                f"the Host {host[:80]!r} is not allowed; use a name of this server, or start it with "
                f"--allowed-host {name[:80]}",
                status=403,
                code="host_not_allowed",
            )
        if len(self._allowed) < _REMEMBERED_MAX:
            self._allowed.add(sent)

    def _takes_host(self, name: str) -> bool:
        return self._takes_any_host or name in self._hosts or (self._takes_addresses and _is_address(name))

    def _takes_origin(self, origin: str, host: str) -> bool:
        """Return whether an Origin is allowed, or is the server's own: it equals the Host of the request."""
        if origin in self._origins or ANY in self._origins:
            return True
        scheme, _, authority = origin.partition("://")
        default = f":{_DEFAULT_PORTS.get(scheme, '')}"
        return bool(authority) and authority.removesuffix(default) == host.lower().removesuffix(default)


def _check_single(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise RequestError for a repeated header, because a proxy may check another copy."""
    counts = Counter(name for name, _ in headers if name in _SINGLE_HEADERS)
    for name, count in counts.items():
        if count > 1:
            raise RequestError(f"the request has {count} headers {name.decode()}; send one", code="repeated_header")


def _text(sent: bytes) -> str:
    return sent.decode("latin-1").strip()


def _host_name(host: str) -> str:
    """Return the name or address in a Host header: lower case, without port, brackets and final dot."""
    host = host.lower()
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        return host if rest.lstrip(":").strip("0123456789") else name
    name, colon, port = host.rpartition(":")
    is_port = colon and ":" not in name and port.isdigit()
    return (name if is_port else host).rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    """Return whether a server that listens on `host` is reachable at every address of the machine."""
    return host == "" or (_is_address(host) and ipaddress.ip_address(host).is_unspecified)
