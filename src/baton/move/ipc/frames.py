"""Framing of messages in a byte stream: four bytes of length, little-endian, then the message.

A control message begins with its number, so that the receiver notices a lost or repeated one.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.decide.control.message_order import MessageOrder

FRAME_BYTES_MAX = 256 * 1024 * 1024
HEAD_BYTES = 4
NUMBER_BYTES = 8


def frame(payload: bytes) -> bytes:
    """Return a message with its length in front."""
    return len(payload).to_bytes(HEAD_BYTES, "little") + payload


class FrameReader:
    """Cut a stream of bytes into messages. It buffers at most one incomplete message."""

    def __init__(self) -> None:
        self.bytes_max = FRAME_BYTES_MAX
        """Bound of one message. A server lowers it for clients that are not authenticated, to bound their memory."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes and yield every complete message.

        Raises ValueError if a message is longer than the bound: the peer is no Baton process.
        """
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEAD_BYTES:
            size = int.from_bytes(self._buffer[start : start + HEAD_BYTES], "little")
            if size > self.bytes_max:
                raise ValueError(f"a message announces {size} bytes, more than the {self.bytes_max} allowed")
            if len(self._buffer) - start - HEAD_BYTES < size:
                break
            start += HEAD_BYTES
            yield bytes(self._buffer[start : start + size])
            start += size
        del self._buffer[:start]


class ControlWriter:
    """Number and frame the control messages of one direction of a connection."""

    def __init__(self) -> None:
        self._sent = 0

    def frame(self, payload: bytes) -> bytes:
        """Return the next message with its length and its number in front."""
        number, self._sent = self._sent, self._sent + 1
        return frame(number.to_bytes(NUMBER_BYTES, "little") + payload)


class ControlReader(FrameReader):
    """Cut a stream of bytes into control messages, each of which is yielded once."""

    def __init__(self) -> None:
        super().__init__()
        self._order = MessageOrder()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes and yield every complete message without its number. Drop repeated ones.

        Raises MessageLostError, a ValueError, if a message is missing. The connection is of no use then.
        """
        for message in super().feed(data):
            if self._order.accept(int.from_bytes(message[:NUMBER_BYTES], "little")):
                yield message[NUMBER_BYTES:]
