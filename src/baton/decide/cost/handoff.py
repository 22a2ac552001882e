"""Duration of a handoff: bytes over a link, descriptors, latency, and the part that overlaps the prefill.

Source: LMCache's measurement of 7,500 tokens of Llama-3.1-8B over NVLink (20 ms in blocks of 16 tokens, 8 ms in 128)
gives 157 GB/s and 0.46 us a descriptor; Splitwise's layer-wise transfer leaves 5 to 8 ms exposed.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.core.validation import Bandwidth, Count, Number, Seconds

Streaming = Literal["whole", "layerwise"]
"""When KV is sent: after the prefill, or layer by layer during it."""

DESCRIPTOR_S = 0.46e-6
RESIDUE_S = 0.006
"""Time of a layer-wise transfer that the prefill does not hide, without the bytes of the last layer."""


class HandoffLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link for KV between two workers."""

    bytes_per_s: Bandwidth
    """Bandwidth of the whole worker: all of its GPUs send."""
    latency_s: Seconds = 0.0005
    """Time of an empty transfer: messages, tickets, the next decode step."""
    block_tokens: Count = 128
    """Tokens sent as one run."""
    block_descriptors: Number = 1
    """Transfers per run: 1 if a block is contiguous over all layers, else 2 x layers."""
    streaming: Streaming = "whole"
    residue_s: Seconds = RESIDUE_S

    def transfer_s(self, *, tokens: int, token_bytes: float) -> float:
        """Return the seconds to send the KV of `tokens` over an idle link."""
        descriptors = -(-tokens // self.block_tokens) * self.block_descriptors
        return tokens * token_bytes / self.bytes_per_s + descriptors * DESCRIPTOR_S + self.latency_s

    def exposed_s(self, *, tokens: int, token_bytes: float, layers: int, prefill_s: float) -> float:
        """Return the seconds of the transfer that remain after a prefill of `prefill_s`."""
        transfer_s = self.transfer_s(tokens=tokens, token_bytes=token_bytes)
        if self.streaming == "whole":
            return transfer_s
        return min(transfer_s, max(0.0, transfer_s - prefill_s * (layers - 1) / layers) + self.residue_s)


def buffer_bytes(*, layers: int, tokens: int, kv_heads: int, head_dim: int, value_bytes: float) -> int:
    """Return the size of a transfer buffer for the KV of `tokens`, rounded up to 256 MiB."""
    unit = 256 * 2**20
    wanted = 2 * layers * tokens * kv_heads * head_dim * value_bytes
    return int(-(-wanted // unit)) * unit


def break_even_bytes_per_s(*, token_bytes: float, saved_s: float, tokens: int) -> float:
    """Return the bandwidth at which fetching the KV of `tokens` takes as long as computing it (`saved_s`).

    Below it a recompute is faster. Source: Mooncake (FAST '25), equation 2.
    """
    return token_bytes * tokens / saved_s
