"""A server that ends cuts its streams, and the next one continues them: same text, no token lost or doubled."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving import RunningServer, serving

KEYS = ("--api-key", "alice", "--api-key", "bob")
ALICE, BOB = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
TOKENS = 3800
COMPLETION = {"prompt": "a stream that outlives its server", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1}
CHAT = {
    "messages": [{"role": "user", "content": "Tell me more."}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "seed": 5,
    "presence_penalty": 0.5,
}
ROUTES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


class Stream:
    """A stream and what has come of it."""

    def __init__(self, client: httpx.Client, path: str, headers: dict[str, str]) -> None:
        self.text, self.error, self.ids, self.last = "", {}, set[str](), {}
        body = {**ROUTES[path], "stream": True, "stream_options": {"include_usage": True}}
        self._opened = client.stream("POST", path, json=body, headers=headers)
        self.response = self._opened.__enter__()
        self._lines = self.response.iter_lines()

    def read(self, characters: int | None = None) -> Stream:
        """Read until so many characters have come, or to the end."""
        while characters is None or len(self.text) < characters:
            line = next(self._lines, None)
            if line is None or line == "data: [DONE]":
                self._opened.__exit__(None, None, None)
                break
            if line.startswith("data: "):
                self._take(json.loads(line[6:]))
        return self

    def _take(self, event: dict) -> None:
        self.error = event.get("error", {})
        if self.error:
            return
        self.last = event
        self.ids.add(event["id"])
        for choice in event["choices"]:
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[str, ...]:
    config = tmp_path / "baton.toml"
    folder = tmp_path / "streams"
    config.write_text(f'seed = 3\n[survival]\ndrain_s = 0\nresume_folder = "{folder}"\nresume_s = 60\n')
    return ("hash", "--config", str(config), *KEYS)


def cut(server: RunningServer) -> Iterator[Stream]:
    """Begin a stream of every route, let the server end, and return what has come."""
    with server.client() as client:
        begun = [Stream(client, path, ALICE).read(50) for path in ROUTES]
        server.process.send_signal(signal.SIGTERM)
        yield from [stream.read() for stream in begun]


def test_streams_continue_after_a_restart_with_the_same_text(arguments: tuple[str, ...]) -> None:
    """The seed of the completion is drawn by the server: it is the first draw of each server."""
    with serving(*arguments) as server:
        begun = list(cut(server))
        assert server.process.wait(60) == 0
    assert [stream.error.get("code") for stream in begun] == ["server_stopped"] * 2
    with serving(*arguments) as server, server.client() as client:
        resumed = []
        for path, before in zip(ROUTES, begun, strict=True):
            header = {"x-baton-resume": before.error["resume_id"]}
            stranger = client.post(path, json=ROUTES[path], headers=BOB | header)
            assert (stranger.status_code, stranger.json()["error"]["code"]) == (404, "unknown_resume_id")
            resumed.append(Stream(client, path, ALICE | header).read())
            assert client.post(path, json=ROUTES[path], headers=ALICE | header).status_code == 404
        for path, before, after in zip(ROUTES, begun, resumed, strict=True):
            whole = Stream(client, path, ALICE).read()
            assert (before.text + after.text, after.last["usage"]["completion_tokens"]) == (whole.text, TOKENS)
            assert before.ids == after.ids
            assert after.text
        metrics = client.get("/metrics", headers=ALICE).text
        assert 'baton_resumed_streams_total{outcome="resumed"} 2.0' in metrics
        assert server.stop() == 0
