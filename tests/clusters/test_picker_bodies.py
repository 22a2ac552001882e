"""The bodies of requests and answers in an endpoint picker: the memory that they take, and what is read in them."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from baton.integrations.gateway.exchange import BodyMemory, Exchange, Replies
from baton.integrations.gateway.messages import message_classes
from baton.integrations.grpc.http2 import Stream
from tests.clusters.test_picker import FIRST, Asker, chat, in_loop, mixed

MANY = 4 << 20


@dataclass
class Sent:
    """What a call sends to the proxy."""

    messages: list[bytes] = field(default_factory=list[bytes])

    def send(self, message: bytes) -> None:
        self.messages.append(message)


@dataclass
class Proxy:
    """Sends requests to a picker as the proxy does."""

    memory: BodyMemory = field(default_factory=BodyMemory)
    asker: Asker = field(default_factory=lambda: Asker(mixed(FIRST)))
    classes: dict[str, Any] = field(default_factory=message_classes)

    def open(self) -> tuple[Exchange, Sent]:
        """Send the headers of a request with a body."""
        sent = Sent()
        exchange = Exchange(1, self.asker.picker, Replies(self.classes), self.memory, cast("Stream", sent))
        exchange.handle(self._encoded(request_headers={"end_of_stream": False}))
        return exchange, sent

    def chunk(self, body: bytes, *, is_last: bool = False) -> bytes:
        return self._encoded(request_body={"body": body, "end_of_stream": is_last})

    def answer_headers(self) -> bytes:
        return self._encoded(response_headers={"end_of_stream": False})

    def answer_chunk(self, body: bytes) -> bytes:
        return self._encoded(response_body={"body": body, "end_of_stream": True})

    def statuses(self, sent: Sent) -> list[int]:
        """Return the statuses of the refusals that were sent."""
        replies = map(self.classes["ProcessingResponse"].FromString, sent.messages)
        return [each.immediate_response.status.code for each in replies if each.HasField("immediate_response")]

    def _encoded(self, **content: Any) -> bytes:
        return self.classes["ProcessingRequest"](**content).SerializeToString()


@pytest.mark.parametrize(
    ("body", "copies_max"),
    [(json.dumps({"prompt": "hi", "metadata": "a" * MANY}).encode(), 2.5), (chat("a" * MANY), 4.5)],
    ids=["other fields", "prompt"],
)
def test_a_large_body_is_copied_no_more_often_than_needed(body: bytes, copies_max: float) -> None:
    """Once to join it and once into the messages that pass it on; a prompt twice more, for its blocks."""

    def play() -> None:
        proxy = Proxy()
        exchange, sent = proxy.open()
        *first, last = (body[at : at + 65_536] for at in range(0, len(body), 65_536))
        for part in first:
            exchange.handle(proxy.chunk(part))
        tracemalloc.start()
        try:
            exchange.handle(proxy.chunk(last, is_last=True))
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(sent.messages) > len(body) // 65_536
        assert peak_bytes < copies_max * len(body)

    in_loop(play)


@pytest.mark.parametrize("ends_by", ["answer", "close"])
def test_the_bodies_of_all_requests_have_a_bound(ends_by: str) -> None:
    """A proxy passes bodies on before their ends, so many slow clients could otherwise fill the memory."""

    def play() -> None:
        proxy = Proxy(BodyMemory(100))
        first, first_sent = proxy.open()
        first.handle(proxy.chunk(b"a" * 80, is_last=True))
        second, second_sent = proxy.open()
        second.handle(proxy.chunk(b"b" * 10))
        second.handle(proxy.chunk(b"b" * 20))
        second.handle(proxy.chunk(b"b", is_last=True))
        assert (proxy.statuses(first_sent), proxy.statuses(second_sent)) == ([], [503])
        assert len(second_sent.messages) == 1, "the rest of a refused body is ignored"
        second.close()
        if ends_by == "close":
            first.close()
        else:
            first.handle(proxy.answer_headers())
        third, third_sent = proxy.open()
        third.handle(proxy.chunk(b"c" * 100, is_last=True))
        assert proxy.statuses(third_sent) == []
        assert len(third_sent.messages) > 0

    in_loop(play)


def test_an_answer_with_thousands_of_digits_is_passed_on() -> None:
    """Python turns no text of more than 4,300 digits into a number."""

    def play() -> None:
        proxy = Proxy()
        exchange, sent = proxy.open()
        exchange.handle(proxy.chunk(chat("hi"), is_last=True))
        exchange.handle(proxy.answer_headers())
        body = b'{"usage": {"completion_tokens": ' + b"9" * 5000 + b"}}"
        exchange.handle(proxy.answer_chunk(body))
        reply = proxy.classes["ProcessingResponse"].FromString(sent.messages[-1])
        assert reply.response_body.response.body_mutation.streamed_response.body == body
        exchange.close()

    in_loop(play)
