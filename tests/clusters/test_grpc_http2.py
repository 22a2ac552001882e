"""The HTTP/2 connections of the endpoint picker: frames as clients may send them, in order or not."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from itertools import pairwise
from struct import pack, unpack
from typing import Any

import pytest

from baton.integrations.grpc.frames import PREFACE
from baton.integrations.grpc.http2 import Connection, Stream
from tests.clusters.cached_packages import grpc_folder

DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, PADDED, PRIORITY = 1, 4, 8, 32
WINDOW = 1 << 20
Frame = tuple[int, int, int, bytes]


@pytest.fixture(scope="module", autouse=True)
def _hpack() -> None:
    sys.path.append(str(grpc_folder()))


class Echo:
    """A call that answers each message with itself."""

    def __init__(self, stream: Stream, ended: list[int]) -> None:
        self.stream = stream
        self.ended = ended

    def handle(self, message: bytes) -> None:
        if message == b"fault":
            raise ZeroDivisionError
        self.stream.send(message)

    def finish(self) -> None:
        self.stream.end()

    def close(self) -> None:
        self.ended.append(self.stream.number)


class Wire(asyncio.Transport):
    """The client's end: what the server has written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_paused = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Client:
    """Sends frames to a connection of a server with the method /echo."""

    def __init__(self, *, streams_max: int = 100, window: int | None = None) -> None:
        self.ended: list[int] = []
        self.wire = Wire()
        self.connection = Connection(
            {"/echo": lambda stream: Echo(stream, self.ended)},
            set(),
            streams_max=streams_max,
            message_bytes_max=100_000,
        )
        self.encoder = import_module("hpack").Encoder()
        self.connection.connection_made(self.wire)
        settings = b"" if window is None else pack(">HL", 4, window)
        self.send(PREFACE + frame(SETTINGS, 0, 0, settings))
        assert [each[:2] for each in self.read()] == [(SETTINGS, 0), (WINDOW_UPDATE, 0), (SETTINGS, 1)]

    def block(self, path: str = "/echo") -> bytes:
        return self.encoder.encode([(":method", "POST"), (":path", path), ("te", "trailers")])

    def send(self, *data: bytes) -> None:
        self.connection.data_received(b"".join(data))

    def open(self, number: int, path: str = "/echo") -> None:
        self.send(frame(HEADERS, END_HEADERS, number, self.block(path)))

    def read(self) -> list[Frame]:
        """Return the frames since the last call."""
        frames, data = [], self.wire.written
        self.wire.written = b""
        while data:
            word, flags, number = unpack(">LBL", data[:9])
            frames.append((word & 255, flags, number, data[9 : 9 + (word >> 8)]))
            data = data[9 + (word >> 8) :]
        return frames

    def status(self) -> tuple[str, str]:
        """Return the status and the message of the trailers that were sent last."""
        trailers = dict(import_module("hpack").Decoder().decode(self.read()[-1][3]))
        return trailers["grpc-status"], trailers["grpc-message"]

    def fault(self) -> int | None:
        """Return the error code with which the server has ended the connection. None: it has not."""
        codes = [unpack(">LL", payload)[1] for kind, _, _, payload in self.read() if kind == GOAWAY]
        assert bool(codes) == self.wire.is_closed
        return codes[0] if codes else None


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return pack(">LBL", len(payload) << 8 | kind, flags, number) + payload


def message(data: bytes) -> bytes:
    return pack(">BL", 0, len(data)) + data


def answer(frames: list[Frame], number: int = 1) -> bytes:
    return b"".join(payload for kind, _, of, payload in frames if kind == DATA and of == number)


def test_messages_arrive_whole_however_the_bytes_are_cut() -> None:
    """Frames in parts, messages over several frames, several in one frame, padding, priority, continuations."""
    sent = [b"a" * 10, b"", b"b" * 20_000, b"c"]
    client = Client()
    data, block = b"".join(map(message, sent)), client.block()
    head = frame(HEADERS, PADDED | PRIORITY, 1, b"\x02" + bytes(5) + block[:4] + b"\0\0")
    head += frame(CONTINUATION, 0, 1, block[4:9]) + frame(CONTINUATION, END_HEADERS, 1, block[9:])
    cuts = [0, 3, 7, 16, 9000, len(data)]
    parts = [frame(DATA, PADDED, 1, b"\x03" + data[begin:end] + bytes(3)) for begin, end in pairwise(cuts)]
    stream = head + b"".join(parts) + frame(DATA, END_STREAM, 1)
    for step in (1, 1000):
        client = Client()
        for begin in range(0, len(stream), step):
            client.send(stream[begin : begin + step])
        frames = client.read()
        assert answer(frames) == data
        assert (frames[0][0], frames[-1][:2]) == (HEADERS, (HEADERS, END_HEADERS | END_STREAM))
        assert client.ended == [1]


def test_a_message_waits_for_the_window_of_its_client() -> None:
    client = Client(window=10)
    client.open(1)
    client.send(frame(DATA, END_STREAM, 1, message(b"0123456789")))
    assert [(kind, payload[5:]) for kind, _, _, payload in client.read()][1:] == [(DATA, b"01234")]
    client.send(frame(WINDOW_UPDATE, 0, 1, pack(">L", 2)))
    assert answer(client.read()) == b"56"
    client.send(frame(SETTINGS, 0, 0, pack(">HL", 4, 1000)))
    frames = client.read()
    assert (answer(frames), frames[-1][0], client.ended) == (b"789", HEADERS, [1])


def test_a_client_that_takes_no_answers_may_send_no_further_messages() -> None:
    """Else a server would keep the answers of each. The window opens again once they are taken."""
    client = Client(window=0)
    client.open(1)
    one = frame(DATA, 0, 1, message(b"a" * 16_000))
    for _ in range(WINDOW // 16_005):
        client.send(one)
    assert WINDOW_UPDATE not in [each[0] for each in client.read()]
    client.send(frame(WINDOW_UPDATE, 0, 1, pack(">L", 2 * WINDOW)), frame(WINDOW_UPDATE, 0, 0, pack(">L", 2 * WINDOW)))
    assert (WINDOW_UPDATE, 1) in [(each[0], each[2]) for each in client.read()]
    for _ in range(WINDOW // 32_010):
        client.send(one)
    assert client.fault() is None


def test_calls_are_apart_and_a_fault_ends_only_its_own() -> None:
    client = Client(streams_max=2)
    for number in (1, 3, 5):
        client.open(number)
    assert (RST, 5, pack(">L", 7)) in [(kind, number, payload) for kind, _, number, payload in client.read()]
    client.send(frame(DATA, 0, 1, message(b"fault")))
    assert client.status() == ("13", "ZeroDivisionError")
    client.send(frame(DATA, 0, 1, message(b"late")), frame(DATA, 0, 3, message(b"other")))
    assert answer(client.read(), 3) == message(b"other")
    client.send(frame(RST, 0, 3, pack(">L", 8)))
    assert client.ended == [1, 3]
    client.open(7)
    client.connection.connection_lost(None)
    assert client.ended == [1, 3, 7]


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("/other", b"", ("12", "unknown method '/other'")),
        ("/echo", pack(">BL", 1, 1) + b"a", ("12", "compressed messages are not supported")),
        ("/echo", pack(">BL", 0, 100_001), ("8", "a message has at most 100000 bytes")),
    ],
)
def test_a_call_that_cannot_be_served_gets_a_status(path: str, data: bytes, status: tuple[str, str]) -> None:
    client = Client()
    client.open(1, path)
    if data:
        client.send(frame(DATA, 0, 1, data))
    assert client.status() == status
    client.send(frame(DATA, END_STREAM, 1, b"more"))
    assert client.fault() is None


def test_pings_are_answered_and_a_client_that_does_not_read_is_not_read() -> None:
    client = Client()
    client.send(frame(PING, 0, 0, b"12345678"), frame(SETTINGS, 1, 0), frame(11, 0, 0, b"unknown"))
    assert client.read() == [(PING, 1, 0, b"12345678")]
    client.connection.pause_writing()
    assert client.wire.is_paused
    client.connection.resume_writing()
    assert not client.wire.is_paused


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (lambda _: [frame(DATA, 0, 1, b"a")], 1),
        (lambda _: [frame(HEADERS, END_HEADERS, 2, b"\x82")], 1),
        (lambda _: [frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff")], 9),
        (lambda _: [frame(HEADERS, 0, 1, b"\x82"), frame(PING, 0, 0, bytes(8))], 1),
        (lambda _: [frame(CONTINUATION, END_HEADERS, 1, b"\x82")], 1),
        (lambda _: [frame(HEADERS, 0, 1), *(frame(CONTINUATION, 0, 1, bytes(16_000)) for _ in range(5))], 11),
        (lambda _: [frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09a")], 1),
        (lambda _: [pack(">LBL", 20_000 << 8, 0, 1)], 6),
        (lambda _: [frame(WINDOW_UPDATE, 0, 0, pack(">L", 0))], 1),
        (lambda _: [frame(WINDOW_UPDATE, 0, 0, pack(">L", (1 << 31) - 1))], 3),
        (lambda _: [frame(SETTINGS, 0, 0, pack(">HL", 4, 1 << 31))], 3),
        (lambda block: [frame(HEADERS, END_HEADERS, 3, block()), frame(HEADERS, END_HEADERS, 1, block())], 1),
    ],
)
def test_a_client_that_breaks_the_protocol_is_cut_off(frames: Any, code: int) -> None:
    client = Client()
    client.send(*frames(client.block))
    assert client.fault() == code


def test_another_protocol_is_cut_off() -> None:
    client = Client()
    other = Connection({}, set(), streams_max=1, message_bytes_max=1)
    client.wire = Wire()
    other.connection_made(client.wire)
    other.data_received(b"GET / HTTP/1.1\r\n")
    assert client.fault() == 1
