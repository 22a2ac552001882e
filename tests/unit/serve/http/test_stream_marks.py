"""Marks of streams: however a stream is cut into pieces, chunks go on once their mark has come."""

from __future__ import annotations

import msgspec
import pytest

from baton.core.errors import RequestError
from baton.serve.http.resume import SavedStream
from baton.serve.http.stream_marks import MarkedStream, StreamStart, carried_stream

START = StreamStart(response_id="cmpl-1", seed=7, prompt_hash=b"hash")
STREAM = b"data: role\n\ndata: a\n\n: baton 5,6\n\ndata: b\n\n: baton 7\n\ndata: last\n\ndata: [DONE]\n\n"
MARKED, REST = b"data: role\n\ndata: a\n\ndata: b\n\n", b"data: last\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_pieces_of_any_size_give_the_same_chunks(size: int) -> None:
    stream = MarkedStream(START)
    got = b"".join(stream.feed(STREAM[at : at + size]) for at in range(0, len(STREAM), size))
    assert (got, stream.tokens.tolist(), stream.end()) == (MARKED, [5, 6, 7], REST)
    assert not stream.is_cut


@pytest.mark.parametrize("end", range(len(STREAM)))
def test_a_stream_that_breaks_has_sent_what_its_tokens_say(end: int) -> None:
    stream = MarkedStream(START)
    got = stream.feed(STREAM[:end])
    assert (got, stream.tokens.tolist()) in [(b"", []), (MARKED[:21], [5, 6]), (MARKED, [5, 6, 7])]
    stream.drop_waiting()
    assert stream.end() == b""


def test_an_error_of_a_server_that_ends_is_told_from_others() -> None:
    for kind, is_cut in (("service_unavailable_error", True), ("server_error", False)):
        stream = MarkedStream(START)
        stream.feed(b'data: {"error":{"message":"m","type":"%b"}}\n\n' % kind.encode())
        assert stream.is_cut == is_cut


@pytest.mark.parametrize("output", [(), (5, -1)])
def test_a_stream_without_valid_tokens_is_refused(output: tuple[int, ...]) -> None:
    stream = SavedStream(
        path="", owner="", body=b"{}", response_id="r", seed=1, prompt_hash=b"", output=output, expires_unix_s=0
    )
    for body in (msgspec.msgpack.encode(stream), b"{}"):
        with pytest.raises(RequestError):
            carried_stream(body, "/v1/completions", "owner")
