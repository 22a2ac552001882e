"""What the two generating routes do differently: the bytes of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import json

from baton.core.types import FinishReason
from baton.serve.http.choice import Piece, TokenEntry
from baton.serve.http.tools.parser import CallPart
from baton.serve.http.wire.responses import ChatFinish, Usage
from baton.serve.live.port import Timings

DONE = b"data: [DONE]\n\n"
FINISH_JSON: dict[ChatFinish, bytes] = {"stop": b'"stop"', "length": b'"length"', "tool_calls": b'"tool_calls"'}
LOGPROB_MIN = -9999.0
"""What OpenAI writes for the logarithm of zero: JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str
    include_usage: bool
    """Send the usage as a last chunk; every other chunk then says `"usage":null`."""


@dataclass(frozen=True, slots=True)
class Result:
    """A whole choice."""

    index: int
    text: str
    entries: Sequence[TokenEntry]
    finish_reason: FinishReason
    calls: Sequence[CallPart] = ()
    ending: ChatFinish = "stop"
    """`finish_reason`, or that there are tool calls."""


class Dialect(Protocol):
    """Writes answers. All of its bytes are ready for the wire."""

    def delta(self, index: int, piece: Piece, *, first: bool) -> bytes:
        """Write a chunk with new text of a choice."""
        ...

    def last(self, index: int, finish_reason: ChatFinish, timings: Timings) -> bytes:
        """Write the chunk that ends a choice."""
        ...

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        """Write the chunk that follows the last choice where the client wants the usage."""
        ...

    def whole(self, results: Sequence[Result], usage: Usage, timings: Timings) -> bytes:
        """Write the body of an answer that is not streamed."""
        ...


class ChunkFrame:
    """The part of every chunk that does not change, encoded once per answer: a token costs one join of bytes."""

    def __init__(self, head: Head, kind: str) -> None:
        names = b'"id":%b,"object":%b,"created":%d,"model":%b'
        fields = names % (json.encode(head.id), json.encode(kind), head.created, json.encode(head.model))
        self._prefix = b"data: {" + fields + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """Wrap one choice's JSON."""
        return self._prefix + choice + self._suffix

    def last(self, choice: bytes, timings: Timings) -> bytes:
        """Wrap a choice that is over, with its timings."""
        return b'%b%b%b,"timings":%b}\n\n' % (self._prefix, choice, self._suffix[:-3], json.encode(timings))

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        """Write the chunk without choices."""
        return b'%b],"usage":%b,"timings":%b}\n\n' % (self._prefix, json.encode(usage), json.encode(timings))


def finite(logprob: float) -> float:
    """Make a log probability fit for JSON."""
    return max(logprob, LOGPROB_MIN)
