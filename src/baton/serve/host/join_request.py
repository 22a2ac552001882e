"""Request the terms for joining from a server, over HTTP."""

from __future__ import annotations

import http.client
import math
import ssl
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import msgspec

from baton.core.errors import BatonError, ConfigError
from baton.move.etcd import Etcd, EtcdError, server_key
from baton.serve.messages.hosting import HostTerms

TIMEOUT_S = 10.0
_ERROR_BYTES = 2000
_KEY = "; give a key with the scope join: --api-key-file FILE or BATON_JOIN_KEY"
_ADDRESS = "; give the address of a baton serve, without a path"
_HINTS = {401: _KEY, 403: _KEY, 404: _ADDRESS, 405: _ADDRESS, 501: _ADDRESS}


class JoinFailedError(BatonError):
    """The server is unreachable or accepts no host at the moment. The agent tries again."""

    def __init__(self, message: str, again_s: float = math.inf) -> None:
        """`again_s`: seconds after which the same reason is final."""
        super().__init__(message)
        self.again_s = again_s


def find_server(url: str) -> str:
    """Return `url`. If it is etcd://HOST:PORT/NAME, return the URL of the active server of NAME, read from etcd.

    Raises JoinFailedError if etcd does not answer, or knows no active server.
    """
    parts = urlsplit(url)
    if parts.scheme != "etcd":
        return url
    try:
        found = Etcd(f"http://{parts.netloc}").get(server_key(parts.path.strip("/")))
    except EtcdError as error:
        raise JoinFailedError(str(error)) from error
    if found is None:
        raise JoinFailedError(f"no server of {url} is active")
    return found


def request_terms(url: str, api_key: str | None) -> HostTerms:
    """Request the terms and block until the answer. Raises JoinFailedError, or ConfigError if a retry is in vain."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(f"{url.rstrip('/')}/cluster/hosts", data=b"{}", headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=HostTerms)
    except urllib.error.HTTPError as error:
        message = _error_message(error_body(error, _ERROR_BYTES))
        if error.code in (502, 503, 504):
            raise JoinFailedError(f"{url} answers {error.code}: {message}") from error
        hint = _HINTS.get(error.code, "")
        raise ConfigError(f"{url} accepts no host: it answers {error.code}: {message}{hint}") from error
    except (OSError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(why, ssl.SSLCertVerificationError):
            remedy = "name the file with the certificate of its authority in SSL_CERT_FILE"
            raise ConfigError(f"{url} has a certificate that is not trusted: {why.verify_message}; {remedy}") from error
        raise JoinFailedError(f"there is no server at {url}: {why}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{url} is no Baton server of this version: {error}") from error


def error_body(error: urllib.error.HTTPError, bytes_max: int | None = None) -> bytes:
    """Return the body of an error response, at most `bytes_max` of it. Empty if it cannot be read."""
    with error:
        try:
            return error.read(bytes_max)
        except (OSError, http.client.HTTPException):
            return b""


class _ErrorMessage(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _ErrorMessage


def _error_message(body: bytes) -> str:
    """Return the message in an error response, or the first line of a body that is not Baton's JSON."""
    try:
        return msgspec.json.decode(body, type=_Error).error.message
    except msgspec.DecodeError:
        return next(iter(body.decode(errors="replace").splitlines()), "")


def server_address(url: str) -> str:
    """Return the host name or address in a server's URL. Raises ConfigError if it is not an HTTP URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--join {url} is not an HTTP address; give one as in http://10.0.0.1:8000, or etcd://10.0.0.1:2379/NAME"
        )
    return parts.hostname
