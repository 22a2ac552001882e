"""A small client of etcd's JSON interface (version 3): leases, and keys that end with their lease."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.request
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from baton.core.errors import BatonError

TIMEOUT_S = 2.0
_Answer = TypeVar("_Answer")


class EtcdError(BatonError):
    """etcd does not answer, or with an error."""


class _Granted(Struct, rename={"id": "ID"}):
    id: str


class _Renewed(Struct, rename={"ttl_s": "TTL"}):
    ttl_s: int = 0
    """Zero values are left out, as in all answers."""


class _KeptAlive(Struct):
    result: _Renewed


class _Written(Struct):
    succeeded: bool = False


class _Entry(Struct):
    value: bytes = b""


class _Found(Struct):
    kvs: list[_Entry] = []


class Etcd:
    """One etcd server or proxy."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: of a connection, and of an answer."""
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    def grant(self, ttl_s: int) -> str:
        """Return the id of a new lease, which expires after `ttl_s` seconds without `keep_alive`."""
        return self._call("lease/grant", {"TTL": ttl_s}, _Granted).id

    def keep_alive(self, lease: str) -> bool:
        """Renew a lease. Return False if it has expired."""
        return self._call("lease/keepalive", {"ID": lease}, _KeptAlive).result.ttl_s > 0

    def revoke(self, lease: str) -> None:
        """End a lease, with its keys."""
        self._call("lease/revoke", {"ID": lease}, dict)

    def create(self, key: str, value: str, lease: str) -> bool:
        """Write a key if it does not exist. Return whether it was written. It ends with the lease."""
        absent = {"key": _encoded(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        put = {"key": _encoded(key), "value": _encoded(value), "lease": lease}
        return self._call("kv/txn", {"compare": [absent], "success": [{"request_put": put}]}, _Written).succeeded

    def get(self, key: str) -> str | None:
        """Return the newest value of a key, or None if it does not exist."""
        found = self._call("kv/range", {"key": _encoded(key)}, _Found).kvs
        return found[0].value.decode(errors="replace") if found else None

    def _call(self, method: str, body: dict[str, Any], kind: type[_Answer]) -> _Answer:
        request = urllib.request.Request(f"{self._url}/v3/{method}", data=json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return msgspec.json.decode(answer.read(), type=kind, strict=False)  # its numbers are texts
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EtcdError(f"etcd at {self._url} does not answer {method}: {error}") from None


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def server_key(name: str) -> str:
    """Return the key under which the active server of a fleet writes its URL."""
    return f"baton/servers/{name}"
