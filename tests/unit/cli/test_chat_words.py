"""`baton chat` keeps what was said, and nothing of a question that was stopped before its answer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec
import pytest

from baton.cli.chat import Conversation, Message

CHUNK = b'{"choices": [{"delta": {"content": "Hello"}}]}'


@pytest.mark.parametrize(("before", "kept"), [((), ()), ((CHUNK,), ("Hi?", "Hello"))])
def test_a_stopped_answer_is_kept_if_it_has_text(
    before: tuple[bytes, ...], kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C stops the first answer, after the chunks `before`."""
    sent: list[list[str]] = []

    def events(url: str, path: str, key: str | None, body: bytes, *, timeout_s: float) -> Iterator[bytes]:
        sent.append([message["content"] for message in msgspec.json.decode(body)["messages"]])
        if len(sent) == 1:
            yield from before
            raise KeyboardInterrupt
        yield from (CHUNK, b"[DONE]")

    lines = iter(["Hi?", "And you?", "/quit"])
    monkeypatch.setattr("baton.cli.chat.events", events)
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    args = argparse.Namespace(url="http://h", model=None, system=None, temperature=None, max_tokens=None)
    chat = Conversation(args, None, ["m"])
    assert chat.converse() == 0
    assert sent == [["Hi?"], [*kept, "And you?"]]
    assert chat.messages[-1] == Message(role="assistant", content="Hello")
