"""Frames of HTTP/2 as bytes, and the headers of gRPC in them."""

from __future__ import annotations

from string import punctuation
from struct import Struct
from typing import Final
from urllib.parse import quote

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
ACK = END_STREAM = 1
END_HEADERS, PADDED, PRIORITY = 4, 8, 32
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED, COMPRESSION_ERROR, CALM = 1, 3, 6, 7, 9, 11
INITIAL_WINDOW = 65_535
WINDOW_MAX = (1 << 31) - 1
STREAM_WINDOW = 1 << 20
"""Bytes that a client may send ahead on one stream."""
PAID_AT_BYTES = STREAM_WINDOW // 2
"""Received bytes of a stream above which its client is told that it may send as many again."""
FRAME_BYTES_MAX = 16_384
HEADER_BYTES_MAX = 65_536
FRAME: Final = Struct(">LBL")
"""Length (24 bits) and type, flags, stream."""
WORD: Final = Struct(">L")
SETTING: Final = Struct(">HL")
MESSAGE: Final = Struct(">BL")
"""Is compressed, length."""
ANSWER_HEADERS = b"\x88\x0f\x10\x10application/grpc"
""":status 200 and the content type, by the static table of HPACK."""
_REASON_MAX = 500
_PLAIN = " " + punctuation.replace("%", "")
"""Characters that a message of gRPC has as they are, beside letters and digits."""
INDEX = 0x80
"""A byte of HPACK above this one names an entry of its table."""


class ConnectionFault(Exception):
    """The client broke the protocol: the connection ends with an error code of HTTP/2."""

    def __init__(self, code: int) -> None:
        super().__init__(f"HTTP/2 error {code}")
        self.code = code


def unpadded(payload: bytes, flags: int) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(PROTOCOL_ERROR)
    return payload[1 : len(payload) - payload[0]]


def trailers(status: int, reason: str) -> bytes:
    """Return the headers that end a call. `reason`: its beginning is sent, in the escaped form of gRPC."""
    message = quote(reason[:_REASON_MAX], safe=_PLAIN).encode()
    return _literal(b"grpc-status", b"%d" % status) + _literal(b"grpc-message", message)


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a header for HPACK which is kept in no table. `name`: at most 126 bytes."""
    size, rest = bytearray((min(len(value), 127),)), len(value) - 127
    while rest > 127:
        size.append(rest & 127 | 128)
        rest >>= 7
    if len(value) >= 127:
        size.append(rest)
    return bytes((0, len(name))) + name + bytes(size) + value
