"""The key of a request: requests of one tenant whose prompts begin alike have the same key, and reach the same cell."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec
from msgspec import Raw, Struct

from baton.decide.control.cell_router import KEY_BITS

PREFIX_BYTES = 4096
"""Bytes of a prompt without messages that count: about 1,000 tokens."""
MESSAGES_MAX = 16
"""Messages in which the first one of the user is searched. A body may have a million, and the event loop waits."""
_KEY_HEADERS = (b"authorization", b"x-api-key")


class _Body(Struct):
    model: Raw = Raw(b"")
    cache_salt: Raw = Raw(b"")
    messages: Raw = Raw(b"")
    system: Raw = Raw(b"")
    instructions: Raw = Raw(b"")
    prompt: Raw = Raw(b"")
    input: Raw = Raw(b"")

    def prefix(self) -> bytes:
        """Return the beginning of the prompt: of a conversation up to the user's first message, else `PREFIX_BYTES`.

        All turns of a conversation begin like that, and few conversations share it.
        """
        for messages in (self.messages, self.input):
            if bytes(messages).startswith(b"["):
                return bytes(self.system) + bytes(self.instructions) + _opening(messages)
        return bytes(self.instructions) + (bytes(self.prompt) or bytes(self.input))[:PREFIX_BYTES]


class _Message(Struct):
    role: str = ""


_BODIES = msgspec.json.Decoder(_Body)
_LISTS = msgspec.json.Decoder(
    msgspec.defstruct(
        "_FirstMessages", [(f"m{index}", Raw, Raw(b"")) for index in range(MESSAGES_MAX)], array_like=True
    )
)
"""Skips the messages beyond `MESSAGES_MAX`, without an object for each."""
_MESSAGES = msgspec.json.Decoder(_Message)


def prefix_key(headers: Mapping[bytes, bytes], body: bytes) -> int:
    """Return the key of a request. The tenant is its API key."""
    try:
        read = _BODIES.decode(body)
        parts = [bytes(read.model), bytes(read.cache_salt), read.prefix()]
    except (msgspec.DecodeError, RecursionError):
        parts = [body[:PREFIX_BYTES]]  # its cell says what is wrong with it
    digest = blake2b(digest_size=KEY_BITS // 8, person=b"baton-cell")
    for part in (*(headers.get(name, b"") for name in _KEY_HEADERS), *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def _opening(messages: Raw) -> bytes:
    opening = bytearray()
    for message in msgspec.structs.astuple(_LISTS.decode(messages)):
        opening += bytes(message)
        if not bytes(message) or _MESSAGES.decode(message).role == "user":
            break
    return bytes(opening)
