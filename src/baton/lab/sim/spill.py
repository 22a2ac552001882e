"""The spill space in cluster files of the simulator."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from baton.core.validation import Bandwidth, Count, Range
from baton.decide.kv.spill import SpillRules, spill_rules


class SimSpill(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Space for cold KV of running requests, as `kv.spill` of a server's configuration."""

    blocks: Count
    """Number of slots."""
    bytes_per_s: Bandwidth = 1e9
    """Read bandwidth."""
    tokens_per_s_min: Annotated[float, Range(least=0.001)] = 1.0
    """Minimum decode rate of a request: it limits the length of requests."""
    token_bytes: Count = 131_072
    """KV of one token. Default: Llama-3.1-8B in bfloat16."""

    def rules(self, block_tokens: int) -> SpillRules:
        """Return the rules of the spill space for a host pool."""
        return spill_rules(
            blocks=self.blocks,
            block_tokens=block_tokens,
            token_bytes=self.token_bytes,
            bytes_per_s=self.bytes_per_s,
            tokens_per_s_min=self.tokens_per_s_min,
        )
