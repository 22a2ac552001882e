"""API keys: who is asking."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from baton.core.errors import RequestError


def authenticate(headers: Mapping[bytes, bytes], api_keys: Sequence[str]) -> str:
    """Return the name of the client whose key the request bears; empty where no keys are set.

    Every key is compared in full, so the time says nothing about how much of one was right. Raises RequestError (401).
    """
    if not api_keys:
        return ""
    scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not sent.strip():
        raise RequestError(
            "send your API key in the header: Authorization: Bearer <key>", status=401, code="missing_api_key"
        )
    found = [index for index, key in enumerate(api_keys) if hmac.compare_digest(key.encode(), sent.strip())]
    if not found:
        raise RequestError("the API key is not known to this server", status=401, code="invalid_api_key")
    return f"key-{found[0]}"
