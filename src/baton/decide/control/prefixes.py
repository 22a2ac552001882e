"""What the coordinator knows of prompts' blocks on the hosts, in tokens: not all hosts have blocks of one size."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.prefixes import BlocksRemoved, BlocksStored
from baton.core.types import HostId, Request
from baton.decide.kv.hashing import names_of
from baton.decide.kv.prefix_index import PrefixIndex
from baton.decide.kv.window import Window


@dataclass(slots=True)
class Prefixes:
    """Bounded as its index is."""

    _index: PrefixIndex = field(default_factory=PrefixIndex)
    _block_runs: dict[HostId, int] = field(default_factory=dict[HostId, int])
    """Of hosts whose blocks are larger than what requests are hashed in."""

    def note(self, event: BlocksStored | BlocksRemoved) -> None:
        """A host has blocks, or has given them up."""
        if isinstance(event, BlocksRemoved):
            self._index.remove(event.host, event.hashes)
            return
        self._index.store(event.host, event.hashes)
        if event.block_runs > 1:
            self._block_runs[event.host] = event.block_runs

    def forget(self, host: HostId) -> None:
        """A host is gone."""
        self._index.forget(host)
        self._block_runs.pop(host, None)

    def hit_tokens(self, request: Request, block_tokens: int, window: Window | None) -> dict[HostId, int]:
        """Count the leading tokens of a prompt that each host holds; never all of it, for its last is computed.

        `block_tokens`: in each block that prompts are hashed in. `window`: how far back the model sees.
        """
        if not request.block_hashes:
            return {}
        longest = max(0, request.prompt_tokens - 1)
        hits = self._index.hit_blocks(request.block_hashes, window, block_tokens)
        hit_tokens = {host: min(blocks * block_tokens, longest) for host, blocks in hits.items()}
        for runs in sorted({*self._block_runs.values()}):
            names, large_tokens = names_of(request.block_hashes, runs), runs * block_tokens
            for host, blocks in self._index.hit_blocks(names, window, large_tokens).items():
                if self._block_runs.get(host) == runs:
                    hit_tokens[host] = min(blocks * large_tokens, longest)
        return hit_tokens
