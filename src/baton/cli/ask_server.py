"""HTTP requests from commands to a running server."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from baton.core.errors import BatonError, ConfigError
from baton.core.files import open_private
from baton.serve.host.join_request import error_body
from baton.serve.http.wire.errors import ErrorBody

URL = "http://127.0.0.1:8000"
"""Default address of `baton serve`."""
_DATA = b"data: "
TIMEOUT_S = 5.0
"""Maximum time without a byte from the server. The total time of a response is not limited."""
Answer = TypeVar("Answer")


def check_url(url: str) -> None:
    """Raise ConfigError if the URL is not an HTTP address."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:  # unbalanced brackets
        scheme = ""
    if scheme not in ("http", "https"):
        raise ConfigError(f"the URL {url} is not an HTTP address; give one such as {URL}")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names one of several models of a server."""
    parser.add_argument("--model", metavar="NAME", help="one of several models")


def of_model(path: str, model: str | None) -> str:
    """Return the path of a route of the cluster for one model. None: for the first one."""
    return path if model is None else f"{path}?model={quote(model, safe='')}"


def ask(url: str, path: str, api_key: str | None, body: bytes | None = None) -> bytes:
    """Send a request and return the body of the response. Raises BatonError if it is an error.

    `body`: JSON to send with POST. None: the request is a GET.
    """
    with _answer(url, path, api_key, body) as answer:
        return answer.read()


def fetch(url: str, path: str, api_key: str | None, into: Path) -> http.client.HTTPMessage:
    """Download a path to a file, and return the headers. Raises BatonError if it fails or the body is incomplete."""
    with _answer(url, path, api_key) as answer:
        with open_private(into, "wb") as file:
            shutil.copyfileobj(answer, file)
        announced, received_bytes = answer.headers.get("content-length"), into.stat().st_size
        if announced is not None and received_bytes < int(announced):
            raise BatonError(f"{url} sent only {received_bytes} of {announced} bytes of {path}; try again")
        return answer.headers


def events(
    url: str, path: str, api_key: str | None, body: bytes | None = None, *, timeout_s: float = TIMEOUT_S
) -> Generator[bytes]:
    """Yield the data of each server-sent event of a path, as it arrives. Raises BatonError if the stream breaks.

    `body`: JSON to send with POST. `timeout_s`: maximum time without a byte from the server.
    """
    with _answer(url, path, api_key, body, timeout_s) as answer:
        for line in answer:
            if line.startswith(_DATA):
                yield line.removeprefix(_DATA)


def decode_answer(data: bytes, kind: type[Answer], url: str) -> Answer:
    """Decode JSON that the server at `url` has sent. Raises BatonError if another program has sent it."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise BatonError(f"there is no Baton server at {url}: {error}; start one with `baton serve`") from error


@contextlib.contextmanager
def _answer(
    url: str, path: str, api_key: str | None, body: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> Iterator[http.client.HTTPResponse]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    headers |= {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(f"{url.rstrip('/')}{path}", data=body, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        raise BatonError(_refusal(url, error)) from error
    except (OSError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise BatonError(f"there is no Baton server at {url}: {why}; start one with `baton serve`") from error
    with answer:
        try:
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise BatonError(f"the response of {url}{path} was cut off: {error}; try again") from error


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    """Return an error message for a failed request, with Baton's own message if the body has one."""
    if error.code == 401:
        return f"{url} answers 401; give a key with --api-key-file if the server asks for one"
    try:
        words = msgspec.json.decode(error_body(error), type=ErrorBody).error.message
    except msgspec.DecodeError:
        words = f"{error.reason}; is there a Baton server?"
    return f"{url} answers {error.code}: {words}"
