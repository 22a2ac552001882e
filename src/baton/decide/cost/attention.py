"""Time of attention kernels: prompts by (query, key) pairs, decodes by the KV that they read."""

from __future__ import annotations

from dataclasses import dataclass

from baton.decide.cost.hardware import Hardware
from baton.decide.cost.model import FORMAT_BYTES, ModelShape
from baton.decide.cost.parallel import Parallel, Precision, kv_token_gpu_bytes

VALUE_BYTES = 2
"""Bytes of an activation (bf16)."""
LATENT_COMPUTE_RATIO = 0.67
"""Share of the peak FLOP/s that decode attention over a latent reaches. Source: FlashMLA, 660 TFLOP/s on H800."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """One layer's attention on one GPU of a worker."""

    model: ModelShape
    hardware: Hardware
    parallel: Parallel
    precision: Precision

    def prompt_s(self, *, tokens: float, chunks: float, pairs: float) -> float:
        """Return the seconds for the chunks of a step, with the kernel efficiency of a chunk of mean length.

        The efficiency was fitted to whole prompts and is too low for a short chunk after a long prefix. So the result
        is at most the time of the same tokens as decodes, which kernels that split the KV reach.
        """
        if tokens <= 0:
            return 0.0
        kernels, split = self.hardware.kernels, self.parallel.tp * self.parallel.cp
        mean = tokens / chunks
        ratio = kernels.prompt_ratio * mean / (mean + kernels.prompt_half_tokens)
        flops = self.model.pair_flops() * pairs / split
        expand_s = self._expand_flops(tokens, mean, pairs) / split / (kernels.compute_ratio * self.hardware.bf16_flops)
        long_s = flops / (ratio * self.hardware.bf16_flops) + expand_s
        return min(long_s, pairs * self.context_token_s) + chunks * kernels.attention_s / 2

    def _expand_flops(self, tokens: float, mean: float, pairs: float) -> float:
        """Return the FLOP to expand the latent of the cached prefix into keys and values (MLA only)."""
        latent = self.model.latent
        if latent is None:
            return 0.0
        cached = max(0.0, (pairs - tokens * (mean + 1) / 2) / mean)
        return 2 * cached * latent.kv_lora * self.model.heads * (latent.nope + latent.v)

    def ring_s(self, *, tokens: float, beside_s: float) -> float:
        """Return the seconds that attention over prompt tokens waits for KV of the other context-parallel ranks.

        The KV is passed in a ring, and overlaps the attention over KV that is already present (`beside_s`).
        Source: Context Parallelism for Scalable Million-Token Inference (arXiv 2411.01783), ring pass-KV attention.
        """
        others = self.parallel.cp - 1
        if not others or tokens <= 0:
            return 0.0
        passed_bytes = tokens * others / self.parallel.cp * self._layer_kv_bytes
        passed_s = passed_bytes / self.hardware.between_bytes_per_s(self.parallel.tp * self.parallel.cp)
        return others * self.hardware.p2p_latency_s + max(0.0, passed_s - beside_s)

    def merge_s(self, queries: float) -> float:
        """Return the seconds to merge the decode attention results of the context-parallel ranks."""
        if self.parallel.cp == 1 or queries <= 0:
            return 0.0
        latent = self.model.latent
        width = latent.kv_lora if latent is not None else self.model.head_dim
        size_bytes = VALUE_BYTES * queries * self.model.heads / self.parallel.tp * width
        return self.hardware.all_reduce_s(size_bytes, self.parallel.cp)

    @property
    def _layer_kv_bytes(self) -> float:
        """Bytes of one token's KV in one layer, on a GPU that holds it."""
        layers = -(-self.model.layers // self.parallel.pp)
        return kv_token_gpu_bytes(self.model, self.parallel, self.precision.kv) / layers

    @property
    def decode_start_s(self) -> float:
        """Fixed seconds of decode attention, without context."""
        return self.hardware.kernels.attention_s

    @property
    def context_token_s(self) -> float:
        """Seconds per token of context that decodes read."""
        model, parallel, kernels = self.model, self.parallel, self.hardware.kernels
        each = FORMAT_BYTES[self.precision.kv]
        bytes_per_s = kernels.decode_ratio * self.hardware.memory_bytes_per_s * parallel.cp
        if model.latent is None:
            return 2 * max(1.0, model.kv_heads / parallel.tp) * model.head_dim * each / bytes_per_s
        latent = model.latent
        flops = 2 * model.heads / parallel.tp * (2 * latent.kv_lora + latent.rope)
        compute_s = flops / (LATENT_COMPUTE_RATIO * self.hardware.bf16_flops * parallel.cp)
        return max((latent.kv_lora + latent.rope) * each / bytes_per_s, compute_s)
