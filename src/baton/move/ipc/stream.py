"""A framed TCP connection between a server and an agent, with a bound on unsent bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from baton.decide.control.message_order import MessageLostError
from baton.move.ipc.frames import ControlReader, ControlWriter

UNSENT_BYTES_MAX = 64 * 1024 * 1024
"""Bound of unsent bytes. A peer that lets more accumulate counts as dead, and the connection is closed."""

_CLOSE_GRACE_S = 1.0
"""How long a last message may take to be sent before the connection is aborted."""

_ROUNDS = 4
"""Checks within one silence limit. If this process itself was stopped, one late check does not close the connection."""

In = TypeVar("In")


class FramedStream(asyncio.Protocol, Generic[In]):
    """Send and receive messages. `on_end` is called once, with the reason."""

    def __init__(
        self, kind: type[In] | object, *, on_message: Callable[[In], None], on_end: Callable[[str], None]
    ) -> None:
        """`kind`: type of the incoming messages, for msgspec. `on_message` gets each of them."""
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(kind)  # pyright: ignore[reportArgumentType]
        self._encoder = msgspec.msgpack.Encoder()
        self.frames = ControlReader()
        self._writer = ControlWriter()
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._why = "it hung up"
        self.is_quiet = False
        """True if no bytes have come since `watch` set it."""

    @property
    def is_open(self) -> bool:
        """Return whether messages can be sent: the connection is made, and neither end has closed it."""
        return self._transport is not None

    @property
    def address(self) -> str:
        """Local address of the connection, by which the other end reaches this host."""
        return str(self._transport.get_extra_info("sockname")[0]) if self._transport is not None else ""

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return str(self._transport.get_extra_info("peername")[0]) if self._transport is not None else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass

    def data_received(self, data: bytes) -> None:
        self.is_quiet = False
        payloads = iter(self.frames.feed(data))
        while self._transport is not None:  # messages behind the one that closed the connection are ignored
            try:
                payload = next(payloads, None)
                if payload is None:
                    return
                message = self._decoder.decode(payload)
            except MessageLostError as error:
                self.end(str(error))
                return
            except ValueError as error:  # msgspec.DecodeError among others; errors of `on_message` are not caught
                self.end(f"it sent an unknown message: {error}; use the same version of Baton on every host")
                return
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end(f"{self._why}: {exc}" if exc is not None else self._why)

    def put(self, message: msgspec.Struct) -> None:
        """Send a message. On a closed connection it is dropped."""
        transport = self._transport
        if transport is None:
            return
        transport.write(self._writer.frame(self._encoder.encode(message)))
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.end(
                f"it does not read: {transport.get_write_buffer_size()} bytes wait, at most {UNSENT_BYTES_MAX} may"
            )

    def end(self, why: str, *farewell: msgspec.Struct) -> None:
        """Close the connection, after a last message if there is one. Unsent bytes are lost."""
        transport = self._transport
        if transport is None:
            return
        self._why = why
        for message in farewell:
            transport.write(self._writer.frame(self._encoder.encode(message)))
        self._transport = None
        if farewell:
            transport.close()
            asyncio.get_running_loop().call_later(_CLOSE_GRACE_S, transport.abort)
        else:
            transport.abort()


async def watch(stream: FramedStream[In], silent_s: float, ping: msgspec.Struct | None) -> None:
    """Close the stream once no bytes have come for `silent_s`. `ping`: message that the other end answers.

    It may begin before the connection is made. Cancel it when the connection has ended.
    """
    quiet_rounds = 0
    while quiet_rounds < _ROUNDS:
        stream.is_quiet = stream.is_open  # a TLS handshake may take longer than `silent_s`
        if ping is not None:
            stream.put(ping)
        await asyncio.sleep(silent_s / _ROUNDS)
        quiet_rounds = quiet_rounds + 1 if stream.is_quiet else 0
    stream.end(f"it has sent nothing for {silent_s:g} s")
