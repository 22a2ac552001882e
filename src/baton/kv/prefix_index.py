"""Which host holds which blocks, as far as the coordinator knows. Fed by the hosts' own events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.types import BlockHash, HostId


class PrefixIndex:
    """A hint for routing, bounded by the blocks of the hosts. A stale entry costs a recompute, never a wrong token."""

    def __init__(self) -> None:
        self._hosts: dict[HostId, set[BlockHash]] = {}

    def store(self, host: HostId, hashes: Iterable[BlockHash]) -> None:
        """Note that the host can serve these blocks."""
        self._hosts.setdefault(host, set()).update(hashes)

    def remove(self, host: HostId, hashes: Iterable[BlockHash]) -> None:
        """Note that the host has given these blocks up."""
        self._hosts.setdefault(host, set()).difference_update(hashes)

    def hit_blocks(self, hashes: Sequence[BlockHash]) -> dict[HostId, int]:
        """Count the leading blocks of a prompt that each host holds."""
        return {host: _leading(held, hashes) for host, held in self._hosts.items()}


def _leading(held: set[BlockHash], hashes: Sequence[BlockHash]) -> int:
    for count, name in enumerate(hashes):
        if name not in held:
            return count
    return len(hashes)
