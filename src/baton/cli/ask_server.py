"""Asking a running server over HTTP, for the commands that look at one."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from baton.core.errors import BatonError, ConfigError
from baton.serve.http.wire.errors import ErrorBody

URL = "http://127.0.0.1:8000"
"""Where `baton serve` listens unless told otherwise."""
TIMEOUT_S = 5.0
"""Of silence: a server that answers slowly is waited for as long as something comes."""


def check_url(url: str) -> None:
    """Raises ConfigError for what is no address of a server."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:  # brackets that do not close
        scheme = ""
    if scheme not in ("http", "https"):
        raise ConfigError(f"--url {url} is no HTTP address; give one as in http://127.0.0.1:8000")


def ask(url: str, path: str, api_key: str | None) -> bytes:
    """Read what a server says at a path. Raises BatonError where it does not."""
    with _answer(url, path, api_key) as answer:
        return answer.read()


def fetch(url: str, path: str, api_key: str | None, into: Path) -> http.client.HTTPMessage:
    """Write what a server says at a path into a file, and return the headers. Raises BatonError where not all came."""
    with _answer(url, path, api_key) as answer:
        with into.open("wb") as file:
            shutil.copyfileobj(answer, file)
        announced, came_bytes = answer.headers.get("content-length"), into.stat().st_size
        if announced is not None and came_bytes < int(announced):
            raise BatonError(f"{url} hung up after {came_bytes} of {announced} bytes of {path}; ask again")
        return answer.headers


@contextlib.contextmanager
def _answer(url: str, path: str, api_key: str | None) -> Iterator[http.client.HTTPResponse]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}{path}", headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise BatonError(_refusal(url, error)) from error
    except (OSError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise BatonError(f"there is no Baton server at {url}: {why}; start one with `baton serve`") from error
    with answer:
        try:
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise BatonError(f"what {url}{path} says was not kept to its end: {error}; ask again") from error


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    """Say what a server answered, in its own words where it is one of ours."""
    if error.code == 401:
        return f"{url} answers 401; give --api-key if the server asks for one"
    try:
        words = msgspec.json.decode(error.read(), type=ErrorBody).error.message
    except (OSError, msgspec.DecodeError):
        words = f"{error.reason}; is there a Baton server?"
    return f"{url} answers {error.code}: {words}"
