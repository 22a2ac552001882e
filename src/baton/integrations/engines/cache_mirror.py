"""Translate block events of an engine server into Baton's block hashes.

Engines name blocks by hashes of their own. Events contain the tokens of each block, from which Baton's hashes follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.prefixes import CachedRun, EngineCacheChanged
from baton.core.types import BlockHash, HostId
from baton.decide.kv.hashing import block_hash, root_hash

EngineHash = int | bytes
_DEVICE = ("GPU", None)
"""Names of the cache that the engine computes in. Copies in its lower tiers are not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBlocksStored:
    """The server has cached full blocks, in the order of the prompt."""

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    """The block before them. None: they begin the prompt."""
    tokens: Sequence[int]
    block_tokens: int
    salt_keys: Sequence[Sequence[Any] | None] = ()
    """Values that the hash of each block covers beside its tokens; None: it has none. Empty: no block has any."""
    is_adapter: bool = False
    """The blocks are those of an adapter, which Baton does not serve."""
    medium: str | None = None
    group: int | None = None
    """Group of layers in a model whose layers have different caches."""


@dataclass(frozen=True, slots=True)
class EngineBlocksRemoved:
    hashes: Sequence[EngineHash]
    medium: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class EngineCacheCleared:
    """The server has emptied its cache, or events were lost."""


EngineCacheEvent = EngineBlocksStored | EngineBlocksRemoved | EngineCacheCleared


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of the engine: one or more blocks of Baton."""

    parent: BlockHash | None
    first: int
    """Index of its first block of Baton in the prompt."""
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True)
class CacheMirror:
    """The blocks of one server under Baton's hashes."""

    host: HostId
    block_tokens: int
    """Block size of Baton."""
    blocks_max: int
    """Blocks that the mirror remembers. More would be those of lost events: it then starts from nothing."""
    problem: str = ""
    """Why events are ignored. Empty: they are not."""
    _blocks: dict[EngineHash, _Block] = field(default_factory=dict[EngineHash, _Block])

    def apply(self, events: Sequence[EngineCacheEvent]) -> EngineCacheChanged | None:
        """Apply events in order. Return their net change. None: nothing has changed."""
        stored: dict[BlockHash, tuple[BlockHash | None, int]] = {}
        removed: dict[BlockHash, None] = {}
        is_cleared = False
        for event in events:
            match event:
                case EngineBlocksStored():
                    for block in self._store(event):
                        parent = block.parent
                        for index, each in enumerate(block.hashes, block.first):
                            stored[each] = parent, index
                            parent = each
                case EngineBlocksRemoved(hashes=hashes) if _is_followed(event.medium, event.group):
                    for block in (self._blocks.pop(each, None) for each in hashes):
                        for each in block.hashes if block is not None else ():
                            stored.pop(each, None)
                            removed[each] = None
                case EngineBlocksRemoved():
                    pass
                case EngineCacheCleared():
                    self._blocks.clear()
                    stored.clear()
                    removed.clear()
                    is_cleared = True
        if len(self._blocks) > self.blocks_max:
            return self.apply((EngineCacheCleared(),))
        if not (stored or removed or is_cleared):
            return None
        return EngineCacheChanged(self.host, _runs(stored), tuple(removed), is_cleared)

    def _store(self, event: EngineBlocksStored) -> list[_Block]:
        """Add the blocks of an event, and return them.

        Left out: all of them if their parent block is not in the mirror, and those from the first incomplete block, or
        the first block whose hash depends on keys other than a cache salt.
        """
        size = event.block_tokens
        if not _is_followed(event.medium, event.group) or event.is_adapter:
            return []
        if size % self.block_tokens:
            self.problem = f"its blocks have {size} tokens: start Baton with a --block-tokens that divides it"
            return []
        before = None if event.parent is None else self._blocks.get(event.parent)
        if event.parent is not None and before is None:
            return []
        parent, first = (None, 0) if before is None else (before.hashes[-1], before.first + len(before.hashes))
        chain = root_hash(_salt(event)) if parent is None else parent
        found: list[_Block] = []
        for number, name in enumerate(event.hashes):
            tokens = event.tokens[number * size : (number + 1) * size]
            keys = event.salt_keys[number] if number < len(event.salt_keys) else None
            has_salt_only = parent is None and _is_salt(keys)
            if len(tokens) < size or (keys and not has_salt_only):
                break
            hashes: list[BlockHash] = []
            for start in range(0, size, self.block_tokens):
                chain = block_hash(chain, tokens[start : start + self.block_tokens])
                hashes.append(chain)
            block = self._blocks[name] = _Block(parent, first, tuple(hashes))
            found.append(block)
            parent, first = chain, first + len(hashes)
        return found


def _is_followed(medium: str | None, group: int | None) -> bool:
    return medium in _DEVICE and group in (None, 0)


def _is_salt(keys: Sequence[Any] | None) -> bool:
    """Return whether a block's keys are only the salt of its request, which the first block of a prompt has."""
    return keys is not None and len(keys) == 1 and isinstance(keys[0], str)


def _salt(event: EngineBlocksStored) -> str:
    keys = event.salt_keys[0] if event.salt_keys else None
    return str(keys[0]) if keys is not None and _is_salt(keys) else ""


def _runs(stored: dict[BlockHash, tuple[BlockHash | None, int]]) -> tuple[CachedRun, ...]:
    """Join stored blocks that follow each other."""
    runs: list[tuple[BlockHash | None, int, list[BlockHash]]] = []
    for each, (parent, index) in stored.items():
        if runs and parent == runs[-1][2][-1]:
            runs[-1][2].append(each)
        else:
            runs.append((parent, index, [each]))
    return tuple(CachedRun(parent, first, tuple(hashes)) for parent, first, hashes in runs)
