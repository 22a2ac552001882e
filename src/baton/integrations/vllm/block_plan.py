"""The plan of a vLLM scheduler: which KV blocks of its requests are read from Baton's store, and which are written.

vLLM calls it for each request and step. It knows no tensors; `block_copies` moves the bytes that it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.core.types import BlockHash
from baton.decide.kv.hashing import block_hash, root_hash

_KNOWN_MAX = 1 << 20
"""Hashes of stored blocks that are remembered. The store is listed again when there are more."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block of vLLM's cache, and its hash in the store."""

    block: int
    block_hash: BlockHash


@dataclass(slots=True)
class StepCopies:
    """The copies of one step."""

    reads: dict[str, list[BlockCopy]] = field(default_factory=dict[str, list[BlockCopy]])
    """By request. The request waits until they have ended."""
    writes: list[BlockCopy] = field(default_factory=list[BlockCopy])
    """After the step."""
    awaited: list[BlockCopy] = field(default_factory=list[BlockCopy])
    """Writes that another server reads at once: they must have ended with the step."""


@dataclass(slots=True)
class _Request:
    """A request that vLLM runs."""

    tokens: Sequence[int]
    """Its tokens so far. vLLM appends to them."""
    chain: BlockHash
    """Hash of its last hashed block, or its root."""
    hands_off: bool
    """Another server continues it."""
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    blocks: list[int] = field(default_factory=list[int])
    written: int = 0
    """Leading blocks that are stored, or being written."""
    readable: tuple[int, int] = (0, 0)
    """First block and number of the blocks that a read was offered for."""
    has_read: bool = False
    """It has read blocks. vLLM asks again if that failed, and the same blocks would fail again: then it computes."""


@dataclass(slots=True)
class BlockPlan:
    """Implements the scheduler's side of the connector."""

    block_tokens: int
    _requests: dict[str, _Request] = field(default_factory=dict[str, _Request])
    _stored: set[BlockHash] = field(default_factory=set[BlockHash])
    """Blocks that the store is known to hold."""
    _next: StepCopies = field(default_factory=StepCopies)

    def add(self, request_id: str, tokens: Sequence[int], cache_salt: str, *, hands_off: bool) -> None:
        """Note a new request. Those that are not added are ignored."""
        self._requests[request_id] = _Request(tokens, root_hash(cache_salt), hands_off)

    def note_stored(self, hashes: Iterable[BlockHash]) -> None:
        """Replace the blocks that the store is known to hold by those that it lists."""
        self._stored = {*hashes}

    def readable_tokens(self, request_id: str, computed_tokens: int, promised_tokens: int) -> int:
        """Return how many tokens after `computed_tokens` can be read from the store, in full blocks.

        `promised_tokens`: leading tokens that another server has stored for this request. The last token of a prompt
        is always computed. A request reads once.
        """
        request = self._requests.get(request_id)
        if request is None:
            return 0
        first = computed_tokens // self.block_tokens
        if request.has_read:
            request.written = min(request.written, first)
            return 0
        hashes = self._hashes(request, (len(request.tokens) - 1) // self.block_tokens)
        promised = min(promised_tokens // self.block_tokens, len(hashes))
        until = first
        while until < len(hashes) and (until < promised or hashes[until] in self._stored):
            until += 1
        request.readable = first, until - first
        return (until - first) * self.block_tokens

    def begin_reading(self, request_id: str, blocks: Sequence[int]) -> None:
        """Read the offered blocks into vLLM's blocks of a request, with the next step."""
        request = self._requests[request_id]
        first, number = request.readable
        pairs = zip(blocks[first : first + number], request.hashes[first:], strict=False)
        self._next.reads[request_id] = [BlockCopy(*pair) for pair in pairs]
        request.readable, request.written, request.has_read = (0, 0), first + number, True

    def place(self, request_id: str, blocks: Sequence[int], *, replaces: bool) -> None:
        """Note blocks that vLLM has given to a request. `replaces`: they are all of its blocks."""
        request = self._requests.get(request_id)
        if request is not None:
            request.blocks = [*blocks] if replaces else [*request.blocks, *blocks]

    def compute(self, request_id: str, computed_tokens: int) -> None:
        """Write the blocks that are full after the next step, when `computed_tokens` tokens have KV."""
        request = self._requests.get(request_id)
        if request is None:
            return
        full = min(computed_tokens // self.block_tokens, len(request.blocks))
        hashes = self._hashes(request, full)
        writes = self._next.awaited if request.hands_off else self._next.writes
        for index in range(request.written, len(hashes)):
            if hashes[index] not in self._stored:
                writes.append(BlockCopy(request.blocks[index], hashes[index]))
                self._stored.add(hashes[index])
        request.written = max(request.written, len(hashes))
        if len(self._stored) > _KNOWN_MAX:
            self._stored.clear()

    def take(self) -> StepCopies:
        """Return the copies of the next step."""
        taken, self._next = self._next, StepCopies()
        return taken

    def end(self, request_id: str) -> int:
        """Forget a request. Return its leading tokens that are in the store."""
        request = self._requests.pop(request_id, None)
        return 0 if request is None else request.written * self.block_tokens

    def _hashes(self, request: _Request, blocks: int) -> list[BlockHash]:
        """Return the hashes of the leading `blocks` blocks whose tokens are known."""
        size, hashes = self.block_tokens, request.hashes
        while len(hashes) < min(blocks, len(request.tokens) // size):
            start = len(hashes) * size
            request.chain = block_hash(request.chain, request.tokens[start : start + size])
            hashes.append(request.chain)
        return hashes[:blocks]
