"""The connections of a gRPC server over HTTP/2, with as little work per message as a picker can afford.

`grpc.aio` takes 1.4 ms of CPU time for a stream that does nothing, which is several times that of a pick. This server
takes a tenth of it: messages are handled as they arrive, without tasks, and all answers to one read are one write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from logging import getLogger
from typing import Protocol, cast

from baton.integrations.grpc import frames as h2

OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 0, 3, 5, 8, 9
UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 12, 13, 14
"""Status codes of gRPC."""


class Call(Protocol):
    """One call, as its service sees it. All methods run on the event loop, and none waits."""

    def handle(self, message: bytes) -> None:
        """Take a message of the client."""
        ...

    def finish(self) -> None:
        """Note that the client sends no further message."""
        ...

    def close(self) -> None:
        """Note the end of the call, for whatever reason. It is called once."""
        ...


class Stream:
    """The server's side of one call."""

    def __init__(self, connection: Connection, number: int, window: int) -> None:
        self.window = window
        """Bytes that the client still takes."""
        self.call: Call | None = None
        self.received = bytearray()
        """The beginning of a message that is not complete."""
        self.unpaid_bytes = 0
        """Received bytes that the client may not send again yet."""
        self.unsent: deque[bytes] = deque()
        """Frames that wait for the client's window. The last one of a call is its trailers."""
        self.is_begun = self.is_ended = False
        self._connection = connection
        self.number = number

    def send(self, message: bytes) -> None:
        """Send a message to the client. Ignored once the call has ended."""
        if not self.is_ended:
            self._connection.send_message(self, message)

    def end(self, status: int = OK, reason: str = "") -> None:
        """End the call with a status of gRPC."""
        if not self.is_ended:
            self._connection.send_trailers(self, status, reason)


Services = Mapping[str, Callable[[Stream], Call]]
"""Makes a call, by the path of its method."""


class Connection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(
        self, services: Services, open_ones: set[Connection], *, streams_max: int, message_bytes_max: int
    ) -> None:
        """`open_ones`: the connections of the server, to which this one belongs while it is open."""
        self._services = services
        self._open_ones = open_ones
        self._streams_max = streams_max
        self._message_bytes_max = message_bytes_max
        self._decoder = import_module("hpack").Decoder(h2.HEADER_BYTES_MAX)
        self._errors = import_module("hpack").HPACKError
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        """The beginning of a frame that is not complete."""
        self._has_preface = False
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._header_block: tuple[int, int, bytearray] | None = None
        """Stream, flags and the block so far, if its end is in the next frame."""
        self._known_block = (b"", "")
        """The last block of headers and its path, while the same bytes mean the same."""
        self._out: list[bytes] = []
        self._is_reading = False
        self._window = self._stream_window = h2.INITIAL_WINDOW
        """Bytes that the client takes: on all streams now, and on a new stream."""
        self._unpaid_bytes = 0

    # ---- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not subclass it
        self._open_ones.add(self)
        settings = ((3, self._streams_max), (4, h2.STREAM_WINDOW), (6, h2.HEADER_BYTES_MAX))
        self._write(h2.SETTINGS, 0, 0, b"".join(h2.SETTING.pack(*each) for each in settings))
        self._write(h2.WINDOW_UPDATE, 0, 0, h2.WORD.pack(h2.WINDOW_MAX - h2.INITIAL_WINDOW))
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._open_ones.discard(self)
        for stream in list(self._streams.values()):
            self._forget(stream)

    def pause_writing(self) -> None:
        """Read nothing from a client that does not read the answers."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._is_reading = True
        try:
            self._read_frames(self._rest + data if self._rest else data)
        except h2.ConnectionFault as fault:
            self.stop(fault.code)
        self._is_reading = False
        self._flush()

    def stop(self, code: int = 0) -> None:
        """Close the connection with an error code of HTTP/2. 0: in order."""
        if self._transport is not None:
            self._write(h2.GOAWAY, 0, 0, h2.WORD.pack(self._last_stream) + h2.WORD.pack(code))
            self._is_reading = False
            self._flush()
            self._transport.close()

    # ---- frames of the client

    def _read_frames(self, data: bytes) -> None:
        at = 0
        if not self._has_preface:
            if not h2.PREFACE.startswith(data[: len(h2.PREFACE)]):
                raise h2.ConnectionFault(h2.PROTOCOL_ERROR)
            self._has_preface = len(data) >= len(h2.PREFACE)
            at = len(h2.PREFACE) if self._has_preface else 0
        while self._has_preface and len(data) - at >= h2.FRAME.size:
            word, flags, number = h2.FRAME.unpack_from(data, at)
            begin, end = at + h2.FRAME.size, at + h2.FRAME.size + (word >> 8)
            if word >> 8 > h2.FRAME_BYTES_MAX:
                raise h2.ConnectionFault(h2.FRAME_SIZE_ERROR)
            if len(data) < end:
                break
            self._frame(word & 255, flags, number & h2.WINDOW_MAX, data[begin:end])
            at = end
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._header_block is not None and kind != h2.CONTINUATION:
            raise h2.ConnectionFault(h2.PROTOCOL_ERROR)
        if kind == h2.DATA:
            self._data(flags, number, payload)
        elif kind == h2.HEADERS:
            payload = h2.unpadded(payload, flags)[5 if flags & h2.PRIORITY else 0 :]
            self._headers(flags, number, bytearray(payload))
        elif kind == h2.CONTINUATION:
            if self._header_block is None or self._header_block[0] != number:
                raise h2.ConnectionFault(h2.PROTOCOL_ERROR)
            _, first_flags, block = self._header_block
            self._header_block = None
            self._headers(first_flags | flags & h2.END_HEADERS, number, block + payload)
        elif kind == h2.WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == h2.RST_STREAM and number in self._streams:
            self._forget(self._streams[number])
        elif kind == h2.SETTINGS and not flags & h2.ACK:
            self._settings(payload)
        elif kind == h2.PING and not flags & h2.ACK:
            self._write(h2.PING, h2.ACK, 0, payload[:8])

    def _headers(self, flags: int, number: int, block: bytearray) -> None:
        if len(block) > h2.HEADER_BYTES_MAX:
            raise h2.ConnectionFault(h2.CALM)
        if not flags & h2.END_HEADERS:
            self._header_block = (number, flags, block)
            return
        path, stream = self._path(bytes(block)), self._streams.get(number)
        if stream is None:
            stream = self._open(number, path)
        if flags & h2.END_STREAM and stream is not None:
            self._finish(stream)

    def _path(self, block: bytes) -> str:
        """Return the path that a block of headers names. Empty: it names none."""
        if block == self._known_block[0]:
            return self._known_block[1]
        try:
            path = dict(self._decoder.decode(block, raw=True)).get(b":path", b"").decode("latin-1")
        except self._errors as error:
            raise h2.ConnectionFault(h2.COMPRESSION_ERROR) from error
        is_index = min(block, default=0) > h2.INDEX  # then it leaves HPACK's table as it is
        self._known_block = (block, path) if is_index else (b"", "")
        return path

    def _open(self, number: int, path: str) -> Stream | None:
        """Begin a call. Return None for one that is refused."""
        if number <= self._last_stream or number % 2 == 0:
            raise h2.ConnectionFault(h2.PROTOCOL_ERROR)
        self._last_stream = number
        if len(self._streams) >= self._streams_max:
            self._write(h2.RST_STREAM, 0, number, h2.WORD.pack(h2.REFUSED))
            return None
        stream = self._streams[number] = Stream(self, number, self._stream_window)
        service = self._services.get(path)
        if service is None:
            stream.end(UNIMPLEMENTED, f"unknown method {path[:80]!r}")
            return None
        stream.call = service(stream)
        return stream

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        self._unpaid_bytes += len(payload)
        if self._unpaid_bytes > h2.WINDOW_MAX // 2:
            self._write(h2.WINDOW_UPDATE, 0, 0, h2.WORD.pack(self._unpaid_bytes))
            self._unpaid_bytes = 0
        stream = self._streams.get(number)
        if stream is None:
            if number > self._last_stream or not number:
                raise h2.ConnectionFault(h2.PROTOCOL_ERROR)
            return  # it has ended here, and its client does not know yet
        stream.unpaid_bytes += len(payload)
        if stream.unpaid_bytes > h2.STREAM_WINDOW:
            raise h2.ConnectionFault(h2.FLOW_CONTROL_ERROR)
        self._messages(stream, h2.unpadded(payload, flags))
        if stream.unpaid_bytes > h2.PAID_AT_BYTES:
            self._pay(stream)
        if flags & h2.END_STREAM and not stream.is_ended:
            self._finish(stream)

    def _messages(self, stream: Stream, payload: bytes) -> None:
        if stream.received:
            stream.received += payload
            payload = bytes(stream.received) if self._has_message(stream.received) else b""
            stream.received = bytearray() if payload else stream.received
        while payload and not stream.is_ended:
            size = h2.MESSAGE.unpack_from(payload)[1] if len(payload) >= h2.MESSAGE.size else len(payload)
            end = h2.MESSAGE.size + size
            if payload[0]:
                stream.end(UNIMPLEMENTED, "compressed messages are not supported")
            elif size > self._message_bytes_max:
                stream.end(RESOURCE_EXHAUSTED, f"a message has at most {self._message_bytes_max} bytes")
            elif len(payload) < end:
                stream.received += payload
                return
            else:
                _handle(stream, payload[h2.MESSAGE.size : end])
            payload = payload[end:]

    def _has_message(self, received: bytearray) -> bool:
        """Return whether a message is complete, or can be refused."""
        if len(received) < h2.MESSAGE.size:
            return False
        size = h2.MESSAGE.unpack_from(received)[1]
        return len(received) >= h2.MESSAGE.size + size or size > self._message_bytes_max

    def _finish(self, stream: Stream) -> None:
        if stream.call is not None:
            stream.call.finish()

    def _settings(self, payload: bytes) -> None:
        for name, value in h2.SETTING.iter_unpack(payload[: len(payload) // 6 * 6]):
            if name == 4:
                if value > h2.WINDOW_MAX:
                    raise h2.ConnectionFault(h2.FLOW_CONTROL_ERROR)
                for stream in self._streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
        self._write(h2.SETTINGS, h2.ACK, 0, b"")
        self._send_waiting(list(self._streams.values()))

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != h2.WORD.size or not (added := h2.WORD.unpack(payload)[0] & h2.WINDOW_MAX):
            raise h2.ConnectionFault(h2.PROTOCOL_ERROR)
        stream = self._streams.get(number)
        if not number:
            self._window += added
            self._send_waiting([each for each in self._streams.values() if each.unsent])
        elif stream is not None:
            stream.window += added
            self._send_waiting([stream])
        if max(self._window, stream.window if stream is not None else 0) > h2.WINDOW_MAX:
            raise h2.ConnectionFault(h2.FLOW_CONTROL_ERROR)

    # ---- frames to the client

    def send_message(self, stream: Stream, message: bytes) -> None:
        """Send a message of a call, as far as the client's windows allow."""
        self._begin(stream)
        data = h2.MESSAGE.pack(0, len(message)) + message
        if not stream.unsent and len(data) <= min(h2.FRAME_BYTES_MAX, self._window, stream.window):
            self._send_data(stream, data)
        else:
            stream.unsent.extend(data[at : at + h2.FRAME_BYTES_MAX] for at in range(0, len(data), h2.FRAME_BYTES_MAX))
            self._send_waiting([stream])
        if not self._is_reading:
            self._flush()

    def send_trailers(self, stream: Stream, status: int, reason: str) -> None:
        """End a call behind all of its messages."""
        self._begin(stream)
        stream.is_ended = True
        stream.unsent.append(h2.trailers(status, reason))
        self._send_waiting([stream])
        if not self._is_reading:
            self._flush()

    def _begin(self, stream: Stream) -> None:
        if not stream.is_begun:
            stream.is_begun = True
            self._write(h2.HEADERS, h2.END_HEADERS, stream.number, h2.ANSWER_HEADERS)

    def _send_waiting(self, streams: list[Stream]) -> None:
        for stream in streams:
            unsent = stream.unsent
            while unsent:
                if stream.is_ended and len(unsent) == 1:
                    self._write(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, stream.number, unsent.popleft())
                    self._forget(stream)
                    break
                room = min(self._window, stream.window)
                if room <= 0:
                    break
                data = unsent.popleft()
                if len(data) > room:
                    unsent.appendleft(data[room:])
                self._send_data(stream, data[:room])
            if stream.unpaid_bytes > h2.PAID_AT_BYTES:
                self._pay(stream)

    def _send_data(self, stream: Stream, data: bytes) -> None:
        self._window -= len(data)
        stream.window -= len(data)
        self._write(h2.DATA, 0, stream.number, data)

    def _pay(self, stream: Stream) -> None:
        """Let the client send more on a stream, unless it does not take the answers to what it has sent.

        Called for streams with more than `PAID_AT_BYTES` unpaid only.
        """
        if not stream.unsent and not stream.is_ended:
            self._write(h2.WINDOW_UPDATE, 0, stream.number, h2.WORD.pack(stream.unpaid_bytes))
            stream.unpaid_bytes = 0

    def _forget(self, stream: Stream) -> None:
        stream.is_ended = True
        if self._streams.pop(stream.number, None) is not None and stream.call is not None:
            stream.call.close()

    def _write(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self._out.append(h2.FRAME.pack(len(payload) << 8 | kind, flags, number) + payload)

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()


def _handle(stream: Stream, message: bytes) -> None:
    """Give a message to its call. A fault there ends the call, but not the other ones of the connection."""
    if stream.call is None:
        return
    try:
        stream.call.handle(message)
    except Exception as error:
        getLogger("baton.grpc").exception("a call failed")
        stream.end(INTERNAL, f"{type(error).__name__}")
