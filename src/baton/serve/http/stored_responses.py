"""Keep recent responses and chats with their conversations, so that a client reads or continues one by its id."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from baton.core.errors import RequestError
from baton.serve.http.wire.schemas import ChatMessage

RESPONSES_MAX = 1024
"""Maximum kept responses. Beyond it, the owner with the most loses the least recently used one."""
BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes of all kept responses and conversations."""
_MESSAGES = msgspec.json.Decoder(tuple[ChatMessage, ...])


@dataclass(frozen=True, slots=True)
class _Kept:
    messages: bytes
    """Encoded: as objects, a conversation of many small messages takes ten times as much memory."""
    body: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.messages) + len(self.body)


class StoredResponses:
    """Responses and the conversations up to each, by the owner of its key and its id. In memory only. Thread-safe."""

    def __init__(
        self,
        *,
        responses_max: int = RESPONSES_MAX,
        bytes_max: int = BYTES_MAX,
        kind: Literal["response", "chat"] = "response",
        rule: str = "unless `store` is false",
    ) -> None:
        """`kind`: name of the kept objects. `rule`: when a server keeps them. Both are for error messages."""
        self._kind = kind
        self._rule = rule
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._bytes = 0
        self._counts: Counter[str] = Counter()
        """Kept responses of each owner."""
        self._sizes: Counter[str] = Counter()
        """Bytes of each owner's responses and conversations."""
        self._lock = threading.RLock()

    def put(self, owner: str, response_id: str, messages: Sequence[ChatMessage], body: bytes) -> None:
        """Keep a response and its conversation, and drop the oldest ones beyond the limits.

        A too large one is not kept. `body`: the response, encoded.
        """
        kept = _Kept(msgspec.json.encode(messages), body)
        with self._lock:
            self._drop((owner, response_id))
            if kept.size_bytes > self._bytes_max:
                return
            self._kept[owner, response_id] = kept
            self._count(owner, 1, kept.size_bytes)
            self._drop_oldest()

    def change(self, owner: str, response_id: str, body: bytes) -> None:
        """Replace the body of a kept response, in its place. Raises RequestError (404) if it is not kept."""
        with self._lock:
            old = self._find(owner, response_id)
            self._kept[owner, response_id] = _Kept(old.messages, body)
            self._count(owner, 0, len(body) - len(old.body))
            self._drop_oldest()

    def get(self, owner: str, response_id: str) -> tuple[ChatMessage, ...]:
        """Return the conversation up to a response. Raises RequestError (404) if it is not kept."""
        with self._lock:
            kept = self._kept.get((owner, response_id))
            if kept is not None:
                self._kept.move_to_end((owner, response_id))
                return _MESSAGES.decode(kept.messages)
        message = f"{self._missing(response_id)}; send the whole conversation as `input`"
        raise RequestError(message, param="previous_response_id", status=404, code="previous_response_not_found")

    def messages(self, owner: str, response_id: str) -> tuple[ChatMessage, ...]:
        """Return the messages that are kept with a response. Raises RequestError (404)."""
        return _MESSAGES.decode(self._find(owner, response_id).messages)

    def body(self, owner: str, response_id: str) -> bytes:
        """Return a response, encoded. Raises RequestError (404) if it is not kept."""
        return self._find(owner, response_id).body

    def bodies(self, owner: str) -> list[bytes]:
        """Return the responses of an owner, encoded, the oldest first."""
        with self._lock:
            return [kept.body for (other, _), kept in self._kept.items() if other == owner]

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises RequestError (404) if it is not kept."""
        with self._lock:
            self._find(owner, response_id)
            self._drop((owner, response_id))

    def _find(self, owner: str, response_id: str) -> _Kept:
        kept = self._kept.get((owner, response_id))
        if kept is None:
            raise RequestError(self._missing(response_id), status=404, code=f"{self._kind}_not_found")
        return kept

    def _missing(self, response_id: str) -> str:
        return (
            f"there is no {self._kind} {response_id[:160]!r}: this server keeps the latest {self._responses_max} in "
            f"memory, {self._rule}"
        )

    def _drop_oldest(self) -> None:
        """Drop responses beyond the limits, of the owner with the most: no client ends the conversations of others."""
        while len(self._kept) > self._responses_max:
            self._drop_oldest_of(max(self._counts, key=self._counts.__getitem__))
        while self._bytes > self._bytes_max:
            self._drop_oldest_of(max(self._sizes, key=self._sizes.__getitem__))

    def _drop_oldest_of(self, owner: str) -> None:
        self._drop(next(key for key in self._kept if key[0] == owner))

    def _drop(self, key: tuple[str, str]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._count(key[0], -1, -kept.size_bytes)

    def _count(self, owner: str, responses: int, size_bytes: int) -> None:
        """Add to the counts of an owner. Forget an owner without responses."""
        self._bytes += size_bytes
        self._counts[owner] += responses
        self._sizes[owner] += size_bytes
        if not self._counts[owner]:
            del self._counts[owner], self._sizes[owner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The conversation of one request, which is stored once it has its answer."""

    stored: StoredResponses
    owner: str
    messages: tuple[ChatMessage, ...]
    """Without instructions."""
    is_stored: bool

    def store(self, response_id: str, body: bytes, *answer: ChatMessage) -> None:
        """Store the response and the conversation, with its answer if given, unless the client does not want it."""
        if self.is_stored:
            self.stored.put(self.owner, response_id, [*self.messages, *answer], body)
