"""Layout of KV bytes in a block, and the rounding between its number formats.

Workers share an arena only if their layouts are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

KVDtype = Literal["float32", "bfloat16", "float16", "uint8", "int8", "fp8", "fp4", "mxfp4"]
SCALED: frozenset[KVDtype] = frozenset({"int8", "fp8", "fp4", "mxfp4"})
"""Types of 8 and 4 bits, whose scales are stored after the values of a head."""
GROUP_NUMBERS: dict[KVDtype, int] = {"fp4": 16, "mxfp4": 32}
"""4-bit types (e2m1) have a one-byte scale per group of this many numbers: e4m3 in fp4, a power of two in mxfp4. An fp4
head also has a power of two."""
BITS: dict[KVDtype, int] = {"float32": 24, "float16": 11, "bfloat16": 8, "int8": 7, "fp8": 4, "fp4": 2, "mxfp4": 2}
"""Significant bits. uint8 (hash engine) is not a number and cannot be converted."""
WIDER: dict[KVDtype, frozenset[KVDtype]] = {
    "bfloat16": frozenset({"float32"}),
    "float16": frozenset({"float32"}),
    "int8": frozenset({"float32"}),
    "fp8": frozenset({"float32"}),
    "fp4": frozenset({"float32", "bfloat16"}),
    "mxfp4": frozenset({"float32", "bfloat16"}),
}
"""Types that represent every value of a type without loss, scale included. The product of an 8-bit value and its scale
needs up to 31 bits, but engines compute it in float32, so float32 is lossless."""


def cell_bytes(dtype: KVDtype, head_dim: int) -> int:
    """Return the bytes of one head of one token in one plane, its scales included."""
    match dtype:
        case "float32":
            return 4 * head_dim
        case "bfloat16" | "float16":
            return 2 * head_dim
        case "uint8":
            return head_dim
        case "int8" | "fp8":
            return head_dim + 4
        case "fp4":
            return head_dim // 2 + head_dim // GROUP_NUMBERS["fp4"] + 1
        case "mxfp4":
            return head_dim // 2 + head_dim // GROUP_NUMBERS["mxfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of every block that one rank of a parallel worker holds: some layers, heads and tokens."""

    offset_bytes: int
    """Start of the part in the block."""
    size_bytes: int
    layers: range
    heads: range
    tokens: range
    """Offsets in the block."""


class KVLayout(Struct, frozen=True, kw_only=True):
    """A block is contiguous over all layers: [layers, planes, block_tokens, kv_heads, head_dim].

    The block of a parallel worker is the concatenation of its ranks' shards, stage by stage, each in that layout.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: KVDtype
    planes: Literal[1, 2] = 2
    """2: keys, then values. 1: one latent vector per token for both (multi-head latent attention)."""
    tensor_parallel: int = 1
    """Ranks that share the heads. Heads are replicated if there are more ranks than heads; a latent is held by every
    rank."""
    pipeline_parallel: int = 1
    """Stages that share the layers. Earlier stages take the remainder."""
    context_parallel: int = 1
    """Tensor ranks with the same heads that share the tokens of each block, instead of holding all of them."""
    data_parallel: int = 1
    """Processes of a stage that compute requests of their own, over the same blocks. Bytes do not depend on it."""
    order: Literal["token_major", "head_major"] = "token_major"
    """Order in a plane: `[block_tokens, kv_heads]` or `[kv_heads, block_tokens]`. Baton's engines use `token_major`."""

    @property
    def ranks(self) -> int:
        """Number of processes that compute one step together."""
        return self.tensor_parallel * self.data_parallel * self.pipeline_parallel

    @property
    def rank_heads(self) -> int:
        """Number of heads per rank."""
        return max(1, self.kv_heads // self.tensor_parallel)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers and ranks."""
        holders = self.tensor_parallel // self.context_parallel
        return self.planes * self.layers * self.rank_heads * holders * self.head_bytes

    @property
    def rank_tokens(self) -> int:
        """Tokens of a block per rank."""
        return self.block_tokens // self.context_parallel

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one plane, its scale included."""
        return cell_bytes(self.dtype, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Dimensions of one block of a single rank: [layers, planes, block_tokens, kv_heads, head_dim]."""
        return (self.layers, self.planes, self.block_tokens, self.kv_heads, self.head_dim)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Each rank's part of a block; rank r of a stage has the index `stage * tensor_parallel + r`.

        Ranks r to r + context_parallel, r being a multiple of it, share the tokens of the same heads.
        """
        shards: list[Shard] = []
        offset_bytes = 0
        for stage in range(self.pipeline_parallel):
            layers = share(self.layers, self.pipeline_parallel, stage)
            for rank in range(self.tensor_parallel):
                first = rank * self.kv_heads // self.tensor_parallel
                heads = range(first, first + self.rank_heads)
                tokens = share(self.block_tokens, self.context_parallel, rank % self.context_parallel)
                size_bytes = self.planes * len(layers) * self.rank_heads * self.head_bytes * len(tokens)
                shards.append(
                    Shard(offset_bytes=offset_bytes, size_bytes=size_bytes, layers=layers, heads=heads, tokens=tokens)
                )
                offset_bytes += size_bytes
        return tuple(shards)

    def problems(self) -> list[str]:
        """Return every reason why this layout is invalid. Empty: it is valid."""
        counts = {
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "block_tokens": self.block_tokens,
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "context_parallel": self.context_parallel,
            "data_parallel": self.data_parallel,
        }
        found = [f"{name} is {count}, but must be at least 1" for name, count in counts.items() if count < 1]
        if found:
            return found
        heads, ranks, group = self.kv_heads, self.tensor_parallel, GROUP_NUMBERS.get(self.dtype, 1)
        if self.head_dim % group:
            found.append(
                f"{self.dtype} has one scale per {group} numbers, and heads have {self.head_dim}; use int8 or fp8"
            )
        if heads % ranks and ranks % heads:
            found.append(f"{heads} KV heads cannot be shared by {ranks} ranks; use a divisor or a multiple of {heads}")
        if self.pipeline_parallel > self.layers:
            found.append(f"{self.layers} layers cannot be shared by {self.pipeline_parallel} pipeline stages; use less")
        return found + self._context_problems()

    def _context_problems(self) -> list[str]:
        ranks, heads, context = self.tensor_parallel, self.kv_heads, self.context_parallel
        if context == 1:
            return []
        found: list[str] = []
        alike = max(1, ranks // heads)
        if alike == 1:
            more = f"leave it out, or use --tp with a multiple of {heads} from {2 * heads} on"
            found.append(f"--dcp {context} divides KV that several ranks hold, and --tp {ranks} holds it once; {more}")
        elif alike % context:
            found.append(f"--dcp {context} does not divide the {alike} ranks that hold a KV head; use a divisor")
        if self.block_tokens % context:
            found.append(
                f"blocks of {self.block_tokens} tokens cannot be shared by {context} ranks; "
                f"use --block-tokens with a multiple of {context}"
            )
        return found


def share(items: int, parts: int, part: int) -> range:
    """Return the items in part number `part` of `parts` equal parts; earlier parts take the remainder."""
    size, more = divmod(items, parts)
    first = part * size + min(part, more)
    return range(first, first + size + (part < more))


def loss(source: KVDtype, target: KVDtype) -> str | None:
    """Describe the rounding of a conversion between KV types. Empty: lossless. None: no conversion exists."""
    if source == target or target in WIDER.get(source, ()):
        return ""
    if source not in BITS or target not in BITS:
        return None
    return f"KV went from {source} to {target}: {_rounding(source, target)}"


def _rounding(source: KVDtype, target: KVDtype) -> str:
    match target:
        case "int8":
            return "each number was rounded to 1/127 of the largest of its head"
        case "fp8":
            return "each number was rounded to 4 significant bits, and to 1/229376 of the largest of its head"
        case "fp4":
            return "each number was rounded to 4 bits, with a scale per 16 numbers"
        case "mxfp4":
            return "each number was rounded to 4 bits, with a power of two per 32 numbers"
        case "float16":
            kept = f"each number was rounded to {min(BITS[source], BITS[target])} significant bits"
            return f"{kept}, fewer below 0.00006, and is infinite from 65520 on"
        case _:
            return f"each number was rounded to {BITS[target]} significant bits"
