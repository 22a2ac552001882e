"""How KV bytes lie in a block. Two workers may share an arena only if their layouts are equal."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

KVDtype = Literal["float32", "bfloat16", "float16", "uint8"]
DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class KVLayout(Struct, frozen=True, kw_only=True):
    """One natural layout: a block is contiguous over layers: [layers, planes, block_tokens, kv_heads, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: KVDtype
    planes: Literal[1, 2] = 2
    """2: keys, then values. 1: one latent vector per token, from which both are read (multi-head latent attention)."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return self.planes * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Dimensions of one block: [layers, planes, block_tokens, kv_heads, head_dim]."""
        return (self.layers, self.planes, self.block_tokens, self.kv_heads, self.head_dim)
