"""Plug-ins in a running server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from baton.serve.http.resume import SavedStream
from baton.serve.http.stream_marks import STREAM_TYPE, StreamStart
from baton.serve.live.hooks import Hooks
from examples.hooks.system_prompt import SystemPrompt
from tests.unit.serve.http.test_hooks import Shout

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 20}


class BreaksAfter:
    """Raises on the third piece."""

    def __init__(self) -> None:
        self.pieces = 0

    def begin(self, body: Mapping[str, Any], route: str) -> BreaksAfter:
        return BreaksAfter()

    def push(self, text: str) -> str:
        self.pieces += 1
        return text if self.pieces < 3 else str(1 // 0)

    def flush(self) -> str:
        return ""


class Breaks(BreaksAfter):
    """Raises on the first piece."""

    def begin(self, body: Mapping[str, Any], route: str) -> BreaksAfter:
        made = BreaksAfter()
        made.pieces = 2
        return made


def test_a_request_hook_changes_the_prompt(build: Callable, serve: Callable) -> None:
    plain = serve(build()).post(CHAT, json=BODY).json()
    hooked = serve(build(hooks=Hooks(request=(SystemPrompt("Be brief."),)))).post(CHAT, json=BODY).json()
    assert hooked["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


def test_an_output_hook_changes_the_text_whole_and_streamed(build: Callable, serve: Callable) -> None:
    plain = serve(build()).post(CHAT, json=BODY).json()["choices"][0]["message"]["content"]
    client = serve(build(hooks=Hooks(output=(Shout(),))))
    assert client.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"] == plain.upper() + "!"
    lines = client.post(CHAT, json=BODY | {"stream": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == plain.upper() + "!"


@pytest.mark.parametrize("stream", [False, True])
def test_a_hook_that_breaks_fails_its_request_and_frees_its_blocks(
    build: Callable, serve: Callable, *, stream: bool
) -> None:
    """Streamed, the error is the last event; either way the server goes on and nothing keeps running."""
    client = serve(build(hooks=Hooks(output=(BreaksAfter(),))))
    # min_tokens: it generates long enough to have a third piece, streamed or not
    response = client.post(CHAT, json=BODY | {"stream": stream, "max_tokens": 4000, "min_tokens": 2000})
    if stream:
        assert response.status_code == 200
        last = response.text.split("\n\n")[-2]
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 500
        last = response.text
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "hook_failed"
    while client.get("/cluster").json()["workers"][0]["kv_blocks_used"]:
        pass  # each round is one request served; the test's timeout bounds it


def test_a_hook_that_breaks_on_a_continued_stream_leaves_no_request(build: Callable, serve: Callable) -> None:
    path, body = "/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 9, "ignore_eos": True}
    started = serve(build()).post(path, json=body, headers={"x-baton-marks": "1"})
    start = msgspec.json.decode(started.headers["x-baton-stream"], type=StreamStart)
    sent = {"path": "", "owner": "", "body": json.dumps(body).encode(), "output": (70,), "expires_unix_s": 0}
    stream = msgspec.msgpack.encode(SavedStream(**sent, **msgspec.structs.asdict(start)))
    house = build(hooks=Hooks(output=(Breaks(),)))
    cancelled: list[Any] = []
    house.gateway.cancel = cancelled.append
    response = serve(house).post(path, content=stream, headers={"content-type": STREAM_TYPE})
    assert (response.status_code, response.json()["error"]["code"], len(cancelled)) == (500, "hook_failed", 1)
