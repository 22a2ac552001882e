"""Which host holds which blocks, as far as the coordinator knows. Fed by the hosts' own events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.types import BlockHash, HostId


class PrefixIndex:
    """A hint for routing, bounded by the blocks of the hosts. A stale entry costs a recompute, never a wrong token.

    By block, not by host: a prompt is looked up in the time that its longest hit takes, however many hosts there are.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, tuple[HostId, ...]] = {}

    def store(self, host: HostId, hashes: Iterable[BlockHash]) -> None:
        """Note that the host can serve these blocks."""
        for name in hashes:
            holders = self._holders.get(name, ())
            if host not in holders:
                self._holders[name] = (*holders, host)

    def remove(self, host: HostId, hashes: Iterable[BlockHash]) -> None:
        """Note that the host has given these blocks up."""
        for name in hashes:
            left = tuple(holder for holder in self._holders.get(name, ()) if holder != host)
            if left:
                self._holders[name] = left
            else:
                self._holders.pop(name, None)

    def forget(self, host: HostId) -> None:
        """Note that the host is gone."""
        self.remove(host, list(self._holders))

    def hit_blocks(self, hashes: Sequence[BlockHash]) -> dict[HostId, int]:
        """Count the leading blocks of a prompt that each host holds. Hosts without any are left out."""
        hits: dict[HostId, int] = {}
        leading = self._holders.get(hashes[0], ()) if hashes else ()
        for count, name in enumerate(hashes):
            holders = self._holders.get(name, ())
            for host in leading:
                if host not in holders:
                    hits[host] = count
            leading = tuple(host for host in leading if host in holders)
            if not leading:
                return hits
        return hits | dict.fromkeys(leading, len(hashes))
