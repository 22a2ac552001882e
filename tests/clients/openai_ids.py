"""A plug-in of pytest for openai-python's own tests, which are written for a mock that knows every id.

It runs in the environment of that library. Ids of the mock become ids of things that a real server has. Nothing else
of a test changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any
from urllib.request import Request, urlopen

import pytest
from openai import AsyncOpenAI, OpenAI

BASE = os.environ["TEST_API_BASE_URL"]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "store": True, "metadata": {"foo": "bar"}}


def _send(path: str, body: bytes, kind: str = "application/json") -> str:
    with urlopen(Request(BASE + path, body, {"content-type": kind}), timeout=60) as answer:
        return json.load(answer)["id"]


def _post(path: str, body: dict[str, Any]) -> str:
    return _send(path, json.dumps(body).encode())


def _file() -> str:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"input": "Hi", "max_output_tokens": 4}}
    parts = [
        '--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        '--X\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n',
        json.dumps(line) + "\n\r\n--X--\r\n",
    ]
    return _send("/files", "".join(parts).encode(), "multipart/form-data; boundary=X")


def _batch() -> str:
    return _post("/batches", {"completion_window": "24h", "endpoint": "/v1/responses", "input_file_id": _file()})


def _response() -> str:
    return _post("/responses", {"input": "Hi", "max_output_tokens": 4})


MAKERS: dict[str, Callable[[], str]] = {
    "response_id": _response,
    "resp_677efb5139a88190b512bc3fef8e535d": _response,
    "previous_response_id": _response,
    "resp_123": _response,
    "file_id": _file,
    "input_file_id": _file,
    "batch_id": _batch,
    "completion_id": lambda: _post("/chat/completions", CHAT),
}
FIELDS = ("input_file_id", "previous_response_id")


def _with_real_ids(options: Any) -> Any:
    parts = [MAKERS[part]() if part in MAKERS else part for part in options.url.split("/")]
    options.url = "/".join(parts)
    if isinstance(options.json_data, dict):
        data = dict(options.json_data)
        for field in FIELDS:
            if data.get(field) in MAKERS:
                data[field] = MAKERS[data[field]]()
        options.json_data = data
    return options


@pytest.fixture(autouse=True)
def real_ids(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the ids, except in tests that answer their own requests."""
    if "respx2_mock" not in request.fixturenames:

        def prepare(_: OpenAI, options: Any) -> Any:
            return _with_real_ids(options)

        async def prepare_async(_: AsyncOpenAI, options: Any) -> Any:
            return _with_real_ids(options)

        monkeypatch.setattr(OpenAI, "_prepare_options", prepare)
        monkeypatch.setattr(AsyncOpenAI, "_prepare_options", prepare_async)
