"""Bodies of 4 MB that are odd in many ways, sent to each route: no other stream stands still, and no memory is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from baton.serve.http.batches.routes import BATCHES_PATH, FILES_PATH
from baton.serve.http.stream_marks import STREAM_TYPE
from tests.attack.conftest import RunningServer, unharmed
from tests.attack.odd_bodies import MAIN_FIELDS, SIZE_BYTES, TYPE, bodies, fields, send_by_all
from tests.attack.refusals import check_refusal

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

SMALL_ROUTES = (
    *("/cluster/workers/{worker}/role", "/cluster/restart", "/cluster/cancel", "/cluster/models", BATCHES_PATH),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
"""Routes that take bodies of 64 KiB."""


def check(responses: list[httpx.Response], name: str, allowed: set[int]) -> None:
    for response in responses:
        assert response.status_code in allowed, f"{name}: {response.status_code}: {response.text[:500]}"
        if response.status_code >= 400:
            if not response.request.url.path.startswith("/v1/messages"):  # it has another body
                check_refusal(response.status_code, response.content)
            assert len(response.content) < 2000, f"{name}: {len(response.content)} bytes"


@pytest.mark.parametrize("path", MAIN_FIELDS)
def test_large_odd_bodies(target: RunningServer, control: RunningServer, path: str) -> None:
    with unharmed(target, control):
        for name, body in bodies(path):
            sent = body.encode()
            assert len(sent) < 1 << 22, name
            check(send_by_all(target.url + path, sent, TYPE), name, {200, 400, 404, 413})


def streams() -> Iterator[tuple[str, bytes]]:
    """Yield forged streams that a router might ask a server to continue, with a name for each."""
    plain = {"path": "", "owner": "", "seed": 1, "prompt_hash": b"", "expires_unix_s": 0}
    sent = {"prompt": "a", "max_tokens": 1, "stream": True}
    valid = plain | {"body": json.dumps(sent).encode(), "response_id": "cmpl-a", "output": (5,)}
    pack = msgspec.msgpack.encode
    yield "many tokens", pack(valid | {"output": (5,) * (2 * SIZE_BYTES)})
    yield "large tokens", pack(valid | {"output": (2**63,) * (SIZE_BYTES // 5)})
    yield "a long id", pack(valid | {"response_id": "i" * SIZE_BYTES})
    yield "a long hash", pack(valid | {"prompt_hash": b"h" * SIZE_BYTES})
    yield "deep", bytes([0x81]) + pack("k") + b"\x91" * SIZE_BYTES
    for name, body in bodies("/v1/completions"):
        yield f"a body with {name}", pack(valid | {"body": body.encode()})


def test_large_streams_to_continue(target: RunningServer, control: RunningServer) -> None:
    url, headers = target.url + "/v1/completions", {"content-type": STREAM_TYPE}
    with unharmed(target, control):
        for name, sent in streams():
            check(send_by_all(url, sent, headers), name, {400, 404, 409})


@pytest.mark.parametrize("path", SMALL_ROUTES)
def test_large_bodies_where_names_are_expected(target: RunningServer, control: RunningServer, path: str) -> None:
    url = target.url + path.format(worker=target.cluster()["workers"][0]["id"])
    with unharmed(target, control):
        for name, body in fields():
            check(send_by_all(url, b"{" + body.encode(), TYPE), name, {413})


FORMS: dict[str, Callable[[], bytes]] = {
    "parts": lambda: b"--X\r\n\r\n\r\n" * 3_000_000 + b"--X--",
    "boundaries": lambda: b"\r\n--X" * 6_000_000 + b"--",
    "names": lambda: b"--X\r\n" + b'; name="' * 4_000_000 + b"\r\n\r\nx\r\n--X--",
    "file names": lambda: b"--X\r\n" + b' filename="' * 2_900_000 + b"\r\n\r\nx\r\n--X--",
    "no end": lambda: b"--X\r\n" * 6_000_000,
    "blank lines": lambda: form(b"\n" * 32_000_000),
    "odd lines": lambda: form(b"{\n" * 16_000_000),
    "one line": lambda: form(b'{"custom_id":"a","method":"POST","url":"%s","body":{"k":[' % b"/v1/completions" + LISTS),
    "long ids": lambda: form(b"".join(b'{"custom_id":"%s%d"}\n' % (b"i" * 1_000_000, number) for number in range(30))),
}
"""Uploads of 32 MB."""
LISTS = b"[]," * 10_000_000 + b"1]}}"


def form(file: bytes) -> bytes:
    part = b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head = b'--X\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    return part + head + file + b"\r\n--X--\r\n"


def run_batch(client: httpx.Client, file_id: str) -> dict[str, Any]:
    """Start a batch of a file, and wait until it has ended. The test's timeout bounds that."""
    fields = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post(BATCHES_PATH, json=fields).raise_for_status().json()
    while batch["status"] not in ("completed", "failed"):
        batch = client.get(f"{BATCHES_PATH}/{batch['id']}").raise_for_status().json()
    return batch


@pytest.mark.parametrize("name", FORMS)
def test_hostile_uploads(target: RunningServer, control: RunningServer, name: str) -> None:
    """A file that is taken fails as the input of a batch."""
    headers = {"content-type": "multipart/form-data; boundary=X"}
    content = FORMS[name]()
    with unharmed(target, control), target.client(timeout_s=120) as client:
        for response in (client.post(FILES_PATH, content=content, headers=headers) for _ in range(2)):
            check([response], name, {200, 400})
            if response.status_code == 200:
                assert run_batch(client, response.json()["id"])["status"] == "failed"
                client.delete(f"{FILES_PATH}/{response.json()['id']}").raise_for_status()
