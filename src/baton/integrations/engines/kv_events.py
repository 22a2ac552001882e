"""KV events of vLLM and SGLang: their two wire forms, and the ZMQ sockets that publish and repeat them.

A message has the frames topic, sequence number (8 bytes, big-endian) and payload. The payload is msgpack:
`[time, events, data-parallel rank]`. An event is a map with the key `type`, or in older versions an array whose first
element is the type (`vllm/distributed/kv_events.py`, `sglang/srt/disaggregation/kv_events.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.integrations.engines.cache_mirror import (
    EngineBlocksRemoved,
    EngineBlocksStored,
    EngineCacheCleared,
    EngineCacheEvent,
    EngineHash,
)

_END = 2**64 - 1
"""Sequence number after the last repeated message: -1."""
_MESSAGES_MAX = 10_000
"""Messages that wait in this process. The server then drops further ones, which is seen as a gap."""
_MESSAGE_BYTES_MAX = 64 * 1024 * 1024
GAP = (EngineCacheCleared(),)
"""Events in place of lost ones: what the server holds is unknown."""


class _Stored(Struct, tag_field="type", tag="BlockStored", frozen=True):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class _StoredMap(_Stored, tag="BlockStored", frozen=True):
    cache_salt: str | None = None
    """The salt of the request, which SGLang has in place of `extra_keys`."""


class _Removed(Struct, tag_field="type", tag="BlockRemoved", frozen=True):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(Struct, tag_field="type", tag="AllBlocksCleared", frozen=True):
    pass


class _StoredArray(_Stored, array_like=True, tag="BlockStored", frozen=True):
    """The older form: the same fields by position."""


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved", frozen=True):
    pass


class _ClearedArray(_Cleared, array_like=True, tag="AllBlocksCleared", frozen=True):
    pass


class _Batch(Struct, array_like=True, frozen=True):
    time_unix_s: float
    events: list[msgspec.Raw]
    rank: int | None = None


_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(_StoredMap | _Removed | _Cleared)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def read_events(payload: bytes) -> list[EngineCacheEvent]:
    """Return the events of a message. Raises msgspec.DecodeError if they are of another form."""
    return [_event(bytes(raw)) for raw in _batches.decode(payload).events]


def _event(raw: bytes) -> EngineCacheEvent:
    is_map = 0x80 <= raw[0] <= 0x8F or raw[0] in (0xDE, 0xDF)  # msgpack's types of maps
    event = (_maps if is_map else _arrays).decode(raw)
    if isinstance(event, _Stored):
        return EngineBlocksStored(
            hashes=event.block_hashes,
            parent=event.parent_block_hash,
            tokens=event.token_ids,
            block_tokens=event.block_size,
            salt_keys=event.extra_keys or _salt_keys(event),
            is_adapter=event.lora_id is not None or event.lora_name is not None,
            medium=event.medium,
            group=event.group_idx,
        )
    if isinstance(event, _Removed):
        return EngineBlocksRemoved(event.block_hashes, event.medium, event.group_idx)
    return EngineCacheCleared()


def _salt_keys(event: _Stored) -> Sequence[Sequence[str]]:
    """Return the keys of the first block in vLLM's form. Only the block that begins a prompt has the salt there."""
    if isinstance(event, _StoredMap) and event.cache_salt and event.parent_block_hash is None:
        return ((event.cache_salt,),)
    return ()


class KvEvents:
    """The subscription to one server's KV events. Connects, and never listens."""

    def __init__(self, address: str, replay_address: str, *, replay_s: float) -> None:
        """`replay_address`: empty if the server repeats no messages. `replay_s`: deadline of a repetition in seconds.

        Raises ConfigError if the package pyzmq is missing, or an address is wrong.
        """
        try:
            import zmq
            import zmq.asyncio
        except ImportError:
            extras = "'baton[vllm]' or 'baton[sglang]'"
            raise ConfigError(f"engines.servers has kv_events, which need pyzmq: pip install {extras}") from None
        self._zmq = zmq
        for given in filter(None, (address, replay_address)):
            try:
                with zmq.Context() as context, context.socket(zmq.SUB) as probe:
                    probe.connect(given)
            except zmq.ZMQError as error:
                raise ConfigError(f"engines.servers: {given} is no address of KV events: {error}") from None
        self._context = zmq.asyncio.Context()
        self._address, self._replay_address = address, replay_address
        self._replay_ms = int(replay_s * 1000)
        self._next = 0 if replay_address else None
        """Number of the next message. None: any, because older ones are not repeated."""

    async def batches(self) -> AsyncGenerator[Sequence[EngineCacheEvent]]:
        """Yield the events of each message in order, from the oldest that the server repeats. Yield `GAP` for a gap."""
        zmq = self._zmq
        with self._context.socket(zmq.SUB) as events:
            events.set(zmq.RCVHWM, _MESSAGES_MAX)
            events.set(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
            events.set(zmq.LINGER, 0)
            events.subscribe(b"")
            events.connect(self._address)
            async with aclosing(self._replay(0)) as known:
                async for number, payload in known:
                    self._next = number + 1
                    yield _read(payload)
            while True:
                _topic, digits, payload = await events.recv_multipart()
                number = int.from_bytes(digits, "big")
                first = number if self._next is None else self._next
                if number < first:
                    continue
                async with aclosing(self._missing(first, number)) as missing:
                    async for each in missing:
                        yield each
                self._next = number + 1
                yield _read(payload)

    async def _missing(self, first: int, until: int) -> AsyncGenerator[Sequence[EngineCacheEvent]]:
        """Yield the events of the messages from `first` to before `until`, and `GAP` for those that are lost."""
        if first == until:
            return
        async with aclosing(self._replay(first)) as known:
            async for number, payload in known:
                if first != number < until:
                    yield GAP
                if number < until:
                    first = number + 1
                    yield _read(payload)
        if first != until:
            yield GAP

    async def _replay(self, first: int) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield the messages from `first` on that the server still has. Ends early if it does not answer."""
        if not self._replay_address:
            return
        zmq = self._zmq
        with self._context.socket(zmq.DEALER) as asking:
            asking.set(zmq.RCVTIMEO, self._replay_ms)
            asking.set(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
            asking.set(zmq.LINGER, 0)
            asking.connect(self._replay_address)
            await asking.send(b"", zmq.SNDMORE)
            await asking.send(first.to_bytes(8, "big"))
            while True:
                try:
                    frames = await asking.recv_multipart()
                except zmq.Again:
                    return
                number = int.from_bytes(frames[-2], "big")
                if number == _END:
                    return
                yield number, frames[-1]

    def close(self) -> None:
        self._context.destroy(linger=0)


def _read(payload: bytes) -> Sequence[EngineCacheEvent]:
    """Return the events of a message; `GAP` if it is not understood."""
    try:
        return read_events(payload)
    except msgspec.DecodeError:
        return GAP
