"""Length-prefixed msgpack: four bytes of length, little-endian, then the message."""

from __future__ import annotations

from collections.abc import Iterator

FRAME_BYTES_MAX = 256 * 1024 * 1024
HEAD_BYTES = 4


def frame(payload: bytes) -> bytes:
    """Put a message's length in front of it."""
    return len(payload).to_bytes(HEAD_BYTES, "little") + payload


class FrameReader:
    """Cut a stream of bytes into messages. Holds at most one incomplete message."""

    def __init__(self) -> None:
        self.bytes_max = FRAME_BYTES_MAX
        """Of one message. Less for somebody who has not said who he is: so much memory he can make us hold."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what came in and yield every message that is now complete.

        Raises ValueError on a length that no message of ours has: the peer is not a Baton process.
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
