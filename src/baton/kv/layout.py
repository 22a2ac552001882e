"""How KV bytes lie in a block. Two workers may share an arena only if their layouts are equal."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

KVDtype = Literal["float32", "bfloat16", "float16", "uint8", "int8", "fp8"]
DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1, "fp8": 1}
SCALE_BYTES: dict[KVDtype, int] = {"int8": 4, "fp8": 4}
"""Numbers of 8 bits have a float32 scale per token and head, right behind the head's numbers."""


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
        return self.planes * self.layers * self.kv_heads * self.head_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one plane, its scale included."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + SCALE_BYTES.get(self.dtype, 0)

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Dimensions of one block: [layers, planes, block_tokens, kv_heads, head_dim]."""
        return (self.layers, self.planes, self.block_tokens, self.kv_heads, self.head_dim)
