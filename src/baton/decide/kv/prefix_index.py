"""The coordinator's index of the blocks that each host holds, updated by events of the hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from baton.core.types import BlockHash, HostId
from baton.decide.kv.window import Window, behind_blocks

_SETS_MAX = 4096
"""Maximum number of interned sets of hosts."""


class PrefixIndex:
    """A hint for routing, bounded by the blocks of all hosts. A stale entry costs a recompute, never a wrong token.

    The index maps each block to its hosts, so a lookup takes time proportional to the longest hit, for any number of
    hosts. The hosts of a block are the bits of one integer. docs/handoff-and-tiers.md states the memory use.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._bits: dict[HostId, int] = {}
        """The bit of every host that holds a block."""
        self._hosts: dict[int, HostId] = {}
        self._blocks: dict[HostId, int] = {}
        """Number of blocks per host. A host without blocks has no bit."""
        self._sets: dict[int, int] = {}
        """Interned integers that stand for sets of hosts, so that equal sets share one object."""

    def store(self, host: HostId, hashes: Iterable[BlockHash]) -> None:
        """Record that the host holds these blocks."""
        bit = self._bit(host)
        holders, added = self._holders, 0
        for block_hash in hashes:
            held = holders.get(block_hash, 0)
            if not held & bit:
                holders[block_hash] = self._shared(held | bit)
                added += 1
        self._count(host, added)

    def remove(self, host: HostId, hashes: Iterable[BlockHash]) -> None:
        """Record that the host has evicted these blocks."""
        bit = self._bits.get(host)
        if bit is None:
            return
        holders, gone = self._holders, 0
        for block_hash in hashes:
            held = holders.get(block_hash, 0)
            if not held & bit:
                continue
            gone += 1
            if held == bit:
                del holders[block_hash]
            else:
                holders[block_hash] = self._shared(held & ~bit)
        self._count(host, -gone)

    def forget(self, host: HostId) -> None:
        """Remove a host that has left."""
        self.remove(host, list(self._holders))

    def __len__(self) -> int:
        """Return the number of distinct blocks."""
        return len(self._holders)

    def hit_blocks(
        self, hashes: Sequence[BlockHash], window: Window | None = None, block_tokens: int = 1
    ) -> dict[HostId, int]:
        """Return the number of leading blocks of a prompt that each host holds. Hosts without a hit are left out.

        `window`: the attention window of the model; only blocks inside it must be held. None: all blocks.
        """
        if window is not None:
            return self._hits_behind(hashes, window, block_tokens)
        hits: dict[HostId, int] = {}
        holders = self._holders
        leading = holders.get(hashes[0], 0) if hashes else 0
        if not leading:
            return hits
        for count, block_hash in enumerate(hashes):
            held = holders.get(block_hash, 0)
            if held == leading:
                continue
            lost = leading & ~held
            if lost:
                hits |= dict.fromkeys(self._hosts_of(lost), count)
                leading &= held
                if not leading:
                    return hits
        return hits | dict.fromkeys(self._hosts_of(leading), len(hashes))

    def _hits_behind(self, hashes: Sequence[BlockHash], window: Window, block_tokens: int) -> dict[HostId, int]:
        """Compute `longest_hit` for all hosts in one pass."""
        hits: dict[HostId, int] = {}
        begun: dict[int, int] = {}
        """Start of the current run of held blocks, by the bit of the host."""
        before = 0
        for count, block_hash in enumerate((*hashes, None)):
            held = self._holders.get(block_hash, 0) if block_hash is not None else 0
            for bit in _bits(before & ~held):
                if begun.pop(bit) <= behind_blocks(window, count * block_tokens, block_tokens):
                    hits[self._hosts[bit]] = count
            begun |= dict.fromkeys(_bits(held & ~before), count)
            before = held
        return hits

    def _hosts_of(self, hosts: int) -> list[HostId]:
        """Return the hosts of a set in the order of their bits."""
        return [self._hosts[bit] for bit in _bits(hosts)]

    def _bit(self, host: HostId) -> int:
        bit = self._bits.get(host)
        if bit is None:
            bit = 1
            while bit in self._hosts:
                bit <<= 1
            self._bits[host], self._hosts[bit] = bit, host
            self._blocks[host] = 0
        return bit

    def _count(self, host: HostId, change: int) -> None:
        left = self._blocks[host] + change
        if left:
            self._blocks[host] = left
            return
        del self._blocks[host], self._hosts[self._bits.pop(host)]

    def _shared(self, hosts: int) -> int:
        if len(self._sets) >= _SETS_MAX:
            self._sets.clear()
        return self._sets.setdefault(hosts, hosts)


def _bits(hosts: int) -> Iterator[int]:
    while hosts:
        bit = hosts & -hosts
        yield bit
        hosts ^= bit
