"""A failed or cut-off answer is failed, never fast: every way in which a server can go wrong."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from odd_server import Body, OddServer, Stream, serving, whole

from baton.lab.bench.client import Client, Reply
from baton.lab.bench.wire import request_fields
from baton.lab.workload.request import TraceRequest

REQUEST = TraceRequest(at_s=0.0, input_tokens=3, output_tokens=4)


async def ask_once(server: OddServer, *, timeout_s: float = 30.0) -> Reply:
    fields = request_fields(model="odd", endpoint="completions", prompt=[1, 2, 3], output_tokens=4, ignore_eos=True)
    body = msgspec.json.encode(fields)
    async with serving(server) as url, Client(f"{url}/v1", api_key=None, timeout_s=timeout_s) as client:
        return await client.ask("/completions", body, request=REQUEST, index=7)


def ask(server: OddServer, *, timeout_s: float = 30.0) -> Reply:
    return asyncio.run(ask_once(server, timeout_s=timeout_s))


async def connection_dies(stream: Stream, body: Body) -> None:
    await stream.token()
    await stream.token()
    assert stream.request.transport is not None
    stream.request.transport.abort()


async def ends_without_finish_reason(stream: Stream, body: Body) -> None:
    await stream.token()
    await stream.usage(1)
    await stream.done()


async def ends_without_done(stream: Stream, body: Body) -> None:
    await stream.token()
    await stream.finish()
    await stream.usage(1)


async def ends_in_the_middle_of_an_event(stream: Stream, body: Body) -> None:
    await stream.token()
    await stream.raw(b'data: {"choices": [{"te')


async def error_in_the_stream(stream: Stream, body: Body) -> None:
    await stream.token()
    await stream.event(error={"message": "worker d0 died", "type": "server_error"})
    await stream.finish()
    await stream.done()


async def rubbish_in_the_stream(stream: Stream, body: Body) -> None:
    await stream.token()
    await stream.raw(b"data: <html>bad gateway</html>\n\n")
    await stream.finish()
    await stream.done()


async def aborted_by_the_server(stream: Stream, body: Body) -> None:
    await stream.token()
    await stream.finish("abort")
    await stream.done()


async def nothing_at_all(stream: Stream, body: Body) -> None:
    await stream.finish("stop")
    await stream.done()


async def hangs(stream: Stream, body: Body) -> None:
    await stream.token()
    await asyncio.Event().wait()


BROKEN = {
    connection_dies: "cut off: ",
    ends_without_finish_reason: "without finish_reason",
    ends_without_done: "without [DONE]",
    ends_in_the_middle_of_an_event: "without finish_reason",
    error_in_the_stream: "error in the stream: worker d0 died",
    rubbish_in_the_stream: "cannot be read",
    aborted_by_the_server: "finish_reason abort",
    nothing_at_all: "without a token",
}


@pytest.mark.parametrize("behave", BROKEN, ids=lambda behave: behave.__name__)
def test_an_answer_that_is_not_whole_has_failed(behave) -> None:
    reply = ask(OddServer(behave=behave))
    assert reply.record.outcome == "failed"
    assert BROKEN[behave] in reply.reason


def test_a_server_that_hangs_fails_at_the_limit() -> None:
    reply = ask(OddServer(behave=hangs), timeout_s=0.2)
    assert (reply.record.outcome, reply.reason) == ("failed", "no complete answer within 0.2 s")


@pytest.mark.parametrize(
    ("status", "outcome"), [(429, "rejected"), (503, "rejected"), (400, "failed"), (404, "failed"), (500, "failed")]
)
def test_a_refusal_is_told_by_its_status(status: int, outcome: str) -> None:
    """429 and 503 are the server's right; everything else is an error. The server's words are kept."""
    reply = ask(OddServer(refuse=status))
    assert (reply.record.outcome, reply.reason) == (outcome, f"HTTP {status}: not today")


def test_an_answer_in_one_piece_is_no_stream() -> None:
    reply = ask(OddServer(content_type="application/json"))
    assert reply.record.outcome == "failed"
    assert "Content-Type is application/json" in reply.reason


def test_nobody_at_the_port_is_a_failure() -> None:
    async def ask_nobody() -> Reply:
        async with serving(OddServer()) as url:
            pass  # the port was free a moment ago
        async with Client(f"{url}/v1", api_key=None, timeout_s=5) as client:
            return await client.ask("/completions", b"{}", request=REQUEST, index=0)

    reply = asyncio.run(ask_nobody())
    assert reply.record.outcome == "failed"
    assert reply.reason.startswith("cut off: ClientConnectorError")


def test_a_whole_answer_is_counted_by_its_usage() -> None:
    reply = ask(OddServer(behave=whole))
    record = reply.record
    assert (record.outcome, reply.reason, reply.counted_by) == ("finished", "", "usage")
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (3, 4, None)
    assert record.arrival_s <= record.token_times_s[0] <= record.token_times_s[-1] <= record.end_s


async def no_usage(stream: Stream, body: Body) -> None:
    for _ in range(3):
        await stream.token()
    await stream.finish()
    await stream.done()


async def three_tokens_per_chunk(stream: Stream, body: Body) -> None:
    await stream.token("one two three")
    await stream.token("four five six")
    await stream.finish()
    await stream.usage(6, prompt_tokens_details={"cached_tokens": 2})
    await stream.done()


async def split_anywhere(stream: Stream, body: Body) -> None:
    """Carriage returns, comments, no space after the colon, and borders of packets inside of events."""
    text = (
        b": hello\r\n\r\nevent: message\r\n"
        b'data:{"choices":[{"text":"\xc3\xa4","finish_reason":null}],"error":null}\r\n\r\n'
        b'data: {"choices":[{"text":"b","finish_reason":"stop"}],"usage":null}\r\n\r\ndata: [DONE]\r\n\r\n'
    )
    for byte in text:
        await stream.raw(bytes([byte]))


async def text_with_the_finish_reason(stream: Stream, body: Body) -> None:
    await stream.token("a")
    await stream.token("b", finish_reason="stop")
    await stream.usage(2)
    await stream.done()


async def only_an_end_of_sequence(stream: Stream, body: Body) -> None:
    """The model has nothing to say: one token, no text."""
    await stream.finish("stop")
    await stream.usage(1)
    await stream.done()


async def dies_after_the_end(stream: Stream, body: Body) -> None:
    await whole(stream, body)
    assert stream.request.transport is not None
    stream.request.transport.abort()


async def reasoning(stream: Stream, body: Body) -> None:
    await stream.event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    await stream.event(choices=[{"delta": {"reasoning_content": "hm"}}])
    await stream.event(choices=[{"delta": {"content": "yes"}}])
    await stream.finish("stop")
    await stream.done()


@pytest.mark.parametrize(
    ("behave", "tokens", "counted_by", "cached"),
    [
        (no_usage, 3, "chunks", None),
        (three_tokens_per_chunk, 6, "usage", 2),
        (split_anywhere, 2, "chunks", None),
        (text_with_the_finish_reason, 2, "usage", None),
        (only_an_end_of_sequence, 1, "usage", None),
        (dies_after_the_end, 4, "usage", None),
        (reasoning, 2, "chunks", None),
    ],
)
def test_unusual_but_whole_answers_finish(behave, tokens: int, counted_by: str, cached: int | None) -> None:
    reply = ask(OddServer(behave=behave))
    assert (reply.record.outcome, reply.reason) == ("finished", "")
    assert (reply.record.output_tokens, reply.counted_by) == (tokens, counted_by)
    assert reply.record.cached_tokens == cached
