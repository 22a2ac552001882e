"""A small client of etcd's JSON interface (version 3): leases, and keys that end with their lease."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.request
from typing import Any

from baton.core.errors import BatonError

TIMEOUT_S = 2.0


class EtcdError(BatonError):
    """etcd does not answer, or with an error."""


class Etcd:
    """One etcd server or proxy."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: of a connection, and of an answer."""
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    def grant(self, ttl_s: int) -> str:
        """Return the id of a new lease, which expires after `ttl_s` seconds without `keep_alive`."""
        return self._call("lease/grant", {"TTL": ttl_s})["ID"]

    def keep_alive(self, lease: str) -> bool:
        """Renew a lease. Return False if it has expired."""
        return int(self._call("lease/keepalive", {"ID": lease})["result"].get("TTL", 0)) > 0

    def revoke(self, lease: str) -> None:
        """End a lease, with its keys."""
        self._call("lease/revoke", {"ID": lease})

    def create(self, key: str, value: str, lease: str) -> bool:
        """Write a key if it does not exist. Return whether it was written. It ends with the lease."""
        absent = {"key": _encoded(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        put = {"key": _encoded(key), "value": _encoded(value), "lease": lease}
        answer = self._call("kv/txn", {"compare": [absent], "success": [{"request_put": put}]})
        return bool(answer.get("succeeded", False))

    def get(self, key: str) -> str | None:
        """Return the newest value of a key, or None if it does not exist."""
        found = self._call("kv/range", {"key": _encoded(key)}).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")).decode() if found else None

    def _call(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._url}/v3/{method}", data=json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return json.loads(answer.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EtcdError(f"etcd at {self._url} does not answer {method}: {error}") from None


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def server_key(name: str) -> str:
    """Return the key under which the active server of a fleet writes its URL."""
    return f"baton/servers/{name}"
