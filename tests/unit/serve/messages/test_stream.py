"""A connection between server and agent: messages, silence, invalid bytes, and a peer that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from baton.move.ipc import stream as module
from baton.move.ipc.frames import ControlWriter
from baton.move.ipc.stream import FramedStream, watch
from baton.move.transport.tcp import with_port


class Note(msgspec.Struct, tag=True):
    text: str


class End:
    """One end of a connection, with the messages that it has received."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stream = FramedStream[Note](
            Note, on_message=lambda note: self.heard.append(note.text), on_end=self.over.set_result
        )


def _connected(play: Callable[[End, End], Awaitable[None]]) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = End(), End()
        server = await loop.create_server(lambda: theirs.stream, "127.0.0.1", 0)
        await loop.create_connection(lambda: ours.stream, *server.sockets[0].getsockname()[:2])
        try:
            await play(ours, theirs)
        finally:
            ours.stream.end("the test is over")
            theirs.stream.end("the test is over")
            server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_last_word_arrives_and_then_the_end() -> None:
    async def play(ours: End, theirs: End) -> None:
        ours.stream.put(Note("hello"))
        ours.stream.end("enough", Note("good bye"))
        ours.stream.put(Note("too late"))
        await theirs.over
        assert theirs.heard == ["hello", "good bye"]
        assert await ours.over == "enough"

    _connected(play)


def test_nonsense_ends_it_with_a_reason() -> None:
    async def play(ours: End, theirs: End) -> None:
        ours.stream._transport.write(ControlWriter().frame(b"\xc1"))
        assert "same version" in await theirs.over

    _connected(play)


def test_silence_ends_it_but_not_while_the_other_end_speaks() -> None:
    async def play(ours: End, theirs: End) -> None:
        speaking = asyncio.create_task(watch(ours.stream, 0.2, Note("are you there?")))
        watching = asyncio.create_task(watch(theirs.stream, 0.2, None))
        assert "nothing for 0.2 s" in await ours.over, "theirs says nothing"
        assert theirs.heard
        speaking.cancel()
        await theirs.over
        watching.cancel()

    _connected(play)


def test_a_connection_is_watched_even_if_it_was_made_late() -> None:
    async def run() -> None:
        loop, end = asyncio.get_running_loop(), End()
        watching = asyncio.create_task(watch(end.stream, 0.04, None))
        assert not (await asyncio.wait({watching}, timeout=0.2))[0]
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        await loop.create_connection(lambda: end.stream, *server.sockets[0].getsockname()[:2])
        assert "nothing for 0.04 s" in await end.over
        server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_reader_that_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNSENT_BYTES_MAX", 1 << 20)

    async def play(ours: End, theirs: End) -> None:
        theirs.stream._transport.pause_reading()
        for _ in range(64):
            ours.stream.put(Note("x" * (1 << 20)))
        assert "does not read" in await ours.over

    _connected(play)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("10.0.0.1", "10.0.0.1:7"),
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("name", "name:7"),
        ("::1", "[::1]:7"),
        ("[::1]", "[::1]:7"),
        ("[::1]:80", "[::1]:80"),
    ],
)
def test_addresses_get_a_port_where_they_have_none(given: str, wanted: str) -> None:
    assert with_port(given, 7) == wanted


def test_what_goes_wrong_in_us_is_not_said_to_be_their_nonsense() -> None:
    """An error of the handler of a valid message is not blamed on the peer."""

    def fail(note: Note) -> None:
        raise ValueError(f"a bug in who reads {note.text}")

    stream = FramedStream[Note](Note, on_message=fail, on_end=lambda why: None)
    stream.connection_made(asyncio.Transport())
    with pytest.raises(ValueError, match="a bug in who reads hello"):
        stream.data_received(ControlWriter().frame(msgspec.msgpack.encode(Note("hello"))))


def test_a_lost_message_ends_the_connection_and_a_repeated_one_is_handled_once() -> None:
    async def play(ours: End, theirs: End) -> None:
        writer = ControlWriter()
        first, second, _lost, last = (writer.frame(msgspec.msgpack.encode(Note(text))) for text in ("a", "b", "c", "d"))
        ours.stream._transport.write(first + second + first + second)
        ours.stream._transport.write(last)
        assert "control message 2 was lost: message 3 arrived in its place" in await theirs.over
        assert theirs.heard == ["a", "b"]

    _connected(play)
