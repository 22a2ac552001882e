"""`baton chat` against a real server."""

from __future__ import annotations

import io
import re

import httpx
import pytest

from tests.command_line import Done, baton
from tests.serving import RunningServer


@pytest.fixture
def talk(hash_server: RunningServer, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs `baton chat` with lines as its input."""

    def talk(*lines: str, more: tuple[str, ...] = ()) -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return baton("chat", hash_server.url, "--max-tokens", "8", "--temperature", "0", *more)

    return talk


def answer(server: RunningServer, *contents: str, system: str = "") -> str:
    """Return the server's own answer to a conversation, whose contents are alternately of the user and the model."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    head = [{"role": "system", "content": system}] if system else []
    body = {"messages": head + messages, "max_tokens": 8, "temperature": 0}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status().json()
    return found["choices"][0]["message"]["content"]


def shown(text: str) -> str:
    """Return a text as the terminal gets it."""
    return re.sub(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)


def test_answers_are_those_of_the_conversation_so_far(talk, hash_server: RunningServer) -> None:
    done = talk("Hello", "and then?", "/new", "/system Be short", "Hello")
    assert done.returncode == 0, done.stderr
    first = answer(hash_server, "Hello")
    second = answer(hash_server, "Hello", first, "and then?")
    third = answer(hash_server, "Hello", system="Be short")
    assert len({first, second, third}) == 3
    assert done.stdout == "".join(f"{shown(text)}\n" for text in (first, second, third)) + "\n"


def test_a_refused_question_is_told_and_the_conversation_goes_on(talk, hash_server: RunningServer) -> None:
    done = talk("/model nothing", "Hello", "/model hash", "/wrong", "/model", "Hello")
    assert done.returncode == 0
    assert "nothing" in done.stderr
    assert "there is no command /wrong" in done.stdout
    assert done.stdout.endswith(f"hash\n{shown(answer(hash_server, 'Hello'))}\n\n")
    assert talk("Hello", more=("--model", "nothing")).returncode == 1


def test_no_server_is_exit_code_1() -> None:
    done = baton("chat", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "there is no Baton server at http://127.0.0.1:9" in done.stderr
    assert baton("chat", "ftp://x").returncode == 2
