"""Marks in a stream, with which a router of cells continues the stream on another server.

The router asks for them by a header. The response's header `x-baton-stream` has the start, and a mark behind each chunk
has the tokens whose text the client has with it. Marks are comments of server-sent events. The last chunks of a stream
have none: a router sends them on once the response is complete.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from baton.core.errors import RequestError
from baton.serve.http.choice import ChoiceText
from baton.serve.http.resume import SavedStream

ASKING_HEADER = b"x-baton-marks"
START_HEADER = b"x-baton-stream"
STREAM_TYPE = "application/vnd.baton.stream"
"""Content-Type of a body that is a `SavedStream` to continue."""
_RESPONSE_ID = re.compile(r"[A-Za-z0-9._:-]{1,160}")
"""Ids of responses: every chunk of a stream repeats the id. A longer one comes from no server."""
_MARK = b": baton "
_EVENT_END = b"\n\n"
_ERROR = b'data: {"error":'


class StreamStart(Struct, frozen=True, kw_only=True):
    """The constant part of a stream's state."""

    response_id: str
    seed: int
    prompt_hash: bytes


@dataclass(slots=True)
class StreamMarks:
    """Writes the marks of a stream with one choice."""

    response_id: str
    _marked_tokens: int = 0

    def header(self, choice: ChoiceText) -> tuple[bytes, bytes]:
        """Return the response's header with the start."""
        seed, prompt_hash = choice.live.request.sampling.seed, choice.prompt.whole_hash
        start = StreamStart(response_id=self.response_id, seed=seed, prompt_hash=prompt_hash)
        return START_HEADER, msgspec.json.encode(start)

    def mark(self, choice: ChoiceText) -> bytes:
        """Return the mark behind a chunk. Call it before the chunk's tokens count as sent."""
        request = choice.live.request
        begin = request.prompt_tokens + request.resumed_tokens + self._marked_tokens
        self._marked_tokens += choice.unsent_tokens
        tokens = choice.live.tokens[begin : begin + choice.unsent_tokens]
        return _MARK + ",".join(map(str, tokens)).encode() + _EVENT_END


def carried_stream(body: bytes, path: str, owner: str) -> SavedStream:
    """Return the stream in a router's body. Raises RequestError (400) if it is invalid."""
    try:
        stream = msgspec.msgpack.decode(body, type=SavedStream)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not a stream to continue: {error}") from error
    if not stream.output or min(stream.output) < 0:
        raise RequestError("a stream to continue has at least one output token, and no token below 0")
    if _RESPONSE_ID.fullmatch(stream.response_id) is None:
        raise RequestError(f"the response_id of a stream to continue has to match {_RESPONSE_ID.pattern}")
    return msgspec.structs.replace(stream, path=path, owner=owner)


@dataclass(slots=True)
class MarkedStream:
    """Reads a stream: separates the marks, and holds chunks back until their mark comes."""

    start: StreamStart
    tokens: array[int] = field(default_factory=lambda: array("I"))
    """Output tokens whose text was sent."""
    _fed: list[int] = field(default_factory=list[int])
    """Output tokens whose text was returned and is not sent yet."""
    _waiting: bytearray = field(default_factory=bytearray)
    """Chunks whose mark has not come."""
    _partial: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """Return the chunks that can be sent to the client. Raises ValueError for an invalid mark."""
        *events, self._partial = (self._partial + data).split(_EVENT_END)
        ready = bytearray()
        for event in events:
            if event.startswith(_MARK):
                self._fed.extend(map(int, event[len(_MARK) :].split(b",")))
                ready += self._waiting
                self._waiting.clear()
            else:
                self._waiting += event + _EVENT_END
        return bytes(ready)

    def confirm(self) -> None:
        """Note that the chunks so far were sent."""
        self.tokens.extend(self._fed)
        self._fed.clear()

    def end(self) -> bytes:
        """Return the last chunks of a complete response."""
        return bytes(self._waiting) + self._partial

    def drop_waiting(self) -> None:
        """Forget the chunks that were not sent: another server writes them again."""
        self._fed.clear()
        self._waiting.clear()
        self._partial = b""

    @property
    def is_cut(self) -> bool:
        """The last chunk is an error of a server that ends, so that another one can continue the stream."""
        return b'"type":"service_unavailable_error"' in self._waiting.rpartition(_ERROR)[2] and _ERROR in self._waiting
