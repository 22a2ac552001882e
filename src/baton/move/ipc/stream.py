"""One framed TCP connection between a server and an agent, with a bound on what the other end does not take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from baton.move.ipc.frames import FrameReader, frame

UNSENT_BYTES_MAX = 64 * 1024 * 1024
"""More than this waits for nobody who is alive: the connection is ended."""

_FAREWELL_S = 1.0
"""How long the last word may take to leave."""

_ROUNDS = 4
"""Looks at a connection within its time of silence: a process that was stopped itself has not looked."""

In = TypeVar("In")


class FramedStream(asyncio.Protocol, Generic[In]):
    """Messages in and out. Its end is told once, in words."""

    def __init__(self, kind: type[In] | object, *, heard: Callable[[In], None], ended: Callable[[str], None]) -> None:
        """`kind`: the messages that come in, as msgspec decodes them."""
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(kind)  # pyright: ignore[reportArgumentType]
        self._encoder = msgspec.msgpack.Encoder()
        self.frames = FrameReader()
        self._heard = heard
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._why = "it hung up"
        self.is_quiet = False
        """Set by whoever watches; nothing has come in since."""

    @property
    def address(self) -> str:
        """Our own end: the address by which the other one reaches us."""
        return str(self._transport.get_extra_info("sockname")[0]) if self._transport is not None else ""

    @property
    def peer(self) -> str:
        """The other end's address."""
        return str(self._transport.get_extra_info("peername")[0]) if self._transport is not None else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self.is_quiet = False
        payloads = iter(self.frames.feed(data))
        while self._transport is not None:  # what comes behind the message that ended it is not looked at
            try:
                payload = next(payloads, None)
                if payload is None:
                    return
                message = self._decoder.decode(payload)
            except ValueError as error:  # msgspec.DecodeError is one; what is wrong in us is none of theirs
                self.end(f"it said what no version of ours says: {error}; use the same version of Baton on every host")
                return
            self._heard(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._ended(f"{self._why}: {exc}" if exc is not None else self._why)

    def put(self, message: msgspec.Struct) -> None:
        """Send a message. On a connection that has ended it goes nowhere."""
        transport = self._transport
        if transport is None:
            return
        transport.write(frame(self._encoder.encode(message)))
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.end(f"it does not read: {transport.get_write_buffer_size()} bytes wait, {UNSENT_BYTES_MAX} may")

    def end(self, why: str, *farewell: msgspec.Struct) -> None:
        """Hang up, after a last word if there is one. What the other end has not taken by then is lost."""
        transport = self._transport
        if transport is None:
            return
        self._why = why
        for message in farewell:
            transport.write(frame(self._encoder.encode(message)))
        self._transport = None
        if farewell:
            transport.close()
            asyncio.get_running_loop().call_later(_FAREWELL_S, transport.abort)
        else:
            transport.abort()


async def watch(stream: FramedStream[In], silent_s: float, ping: msgspec.Struct | None) -> None:
    """Hang up once nothing has come in for so long. `ping`: what the other end answers."""
    quiet_rounds = 0
    while quiet_rounds < _ROUNDS:
        stream.is_quiet = True
        if ping is not None:
            stream.put(ping)
        await asyncio.sleep(silent_s / _ROUNDS)
        quiet_rounds = quiet_rounds + 1 if stream.is_quiet else 0
    stream.end(f"it has said nothing for {silent_s:g} s")
