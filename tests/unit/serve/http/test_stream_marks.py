"""Marks of streams: however a stream is cut into pieces, chunks go on once their mark has come."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.core.errors import RequestError
from baton.serve.http.stream_marks import MarkedStream, StreamStart, carried_stream

START = StreamStart(response_id="cmpl-1", seed=7, prompt_hash=b"hash")
STREAM = b"data: role\n\ndata: a\n\n: baton 5,6\n\ndata: b\n\n: baton 7\n\ndata: last\n\ndata: [DONE]\n\n"
MARKED, REST = b"data: role\n\ndata: a\n\ndata: b\n\n", b"data: last\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_pieces_of_any_size_give_the_same_chunks(size: int) -> None:
    stream = MarkedStream(START)
    got = b"".join(stream.feed(STREAM[at : at + size]) for at in range(0, len(STREAM), size))
    stream.confirm()
    assert (got, stream.tokens.tolist(), stream.end()) == (MARKED, [5, 6, 7], REST)
    assert not stream.is_cut


@pytest.mark.parametrize("end", range(len(STREAM)))
def test_a_stream_that_breaks_has_sent_what_its_tokens_say(end: int) -> None:
    stream = MarkedStream(START)
    got = stream.feed(STREAM[:end])
    stream.confirm()
    assert (got, stream.tokens.tolist()) in [(b"", []), (MARKED[:21], [5, 6]), (MARKED, [5, 6, 7])]
    stream.drop_waiting()
    assert stream.end() == b""


def test_tokens_count_once_their_chunk_was_sent() -> None:
    stream = MarkedStream(START)
    stream.feed(STREAM[:35])
    assert stream.tokens.tolist() == []
    stream.drop_waiting()
    stream.confirm()
    assert stream.tokens.tolist() == []


def test_an_error_of_a_server_that_ends_is_told_from_others() -> None:
    for kind, is_cut in (("service_unavailable_error", True), ("server_error", False)):
        stream = MarkedStream(START)
        stream.feed(b'data: {"error":{"message":"m","type":"%b"}}\n\n' % kind.encode())
        assert stream.is_cut == is_cut


VALID: dict[str, Any] = {
    "path": "",
    "owner": "",
    "body": b"{}",
    "response_id": "cmpl-a.b:1",
    "seed": 1,
    "prompt_hash": b"",
    "output": (5,),
    "expires_unix_s": 0,
}
DEEP = msgspec.msgpack.encode(VALID)[1:] + msgspec.msgpack.encode("k") + b"\x91" * 100_000 + b"\x01"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        msgspec.msgpack.encode(VALID | {"output": ()}),
        msgspec.msgpack.encode(VALID | {"output": (5, -1)}),
        msgspec.msgpack.encode(VALID | {"response_id": "x" * 1_000_000}),
        msgspec.msgpack.encode(VALID | {"response_id": "a\n"}),
        bytes([0x80 + len(VALID) + 1]) + DEEP,
    ],
    ids=["object", "no token", "token below 0", "long id", "odd id", "deep"],
)
def test_an_invalid_stream_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        carried_stream(body, "/v1/completions", "owner")


def test_a_valid_stream_belongs_to_its_sender() -> None:
    stream = carried_stream(msgspec.msgpack.encode(VALID), "/v1/completions", "owner")
    assert (stream.output, stream.path, stream.owner) == ((5,), "/v1/completions", "owner")
