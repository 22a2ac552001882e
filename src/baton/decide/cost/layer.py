"""Time of the layers of a transformer on one GPU of a worker: matrix products, experts, exchange and attention.

Attention depends on the requests: prompts by (query, key) pairs, decodes by the KV that they read. All else depends on
the number of tokens only.
Source: operator fits over AIConfigurator's data, checked against Vidur's linear operators.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.decide.cost.curve import Curve
from baton.decide.cost.hardware import Hardware
from baton.decide.cost.model import FORMAT_BYTES, ModelShape
from baton.decide.cost.parallel import Parallel, Precision, kv_token_gpu_bytes

VALUE_BYTES = 2
"""Bytes of an activation (bf16)."""
QUANTIZE_BYTES = 3
"""Bytes to move per value that is quantized to fp8 in one kernel: read in bf16, written in fp8."""
ELEMENTWISE_S = 8e-6
"""Fixed time per layer of norms, activations, rotations and residual sums."""
ELEMENTWISE_RATIO = 0.8
"""Share of the peak memory bandwidth of elementwise kernels."""
LATENT_COMPUTE_RATIO = 0.67
"""Share of the peak FLOP/s that decode attention over a latent reaches. Source: FlashMLA, 660 TFLOP/s on H800."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Times of one layer's attention on one GPU of a worker."""

    model: ModelShape
    hardware: Hardware
    parallel: Parallel
    precision: Precision

    def prompt_s(self, *, tokens: float, chunks: float, pairs: float) -> float:
        """Return the seconds for the chunks of a step, with the kernel efficiency of a chunk of mean length.

        The efficiency was fitted to whole prompts and is too low for a short chunk after a long prefix. Kernels that
        split the KV compute such a chunk as fast as decodes, so the time of decodes bounds the result.
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
        return 2 * _cached_tokens(tokens, mean, pairs) * latent.kv_lora * self.model.heads * (latent.nope + latent.v)

    def ring_s(self, *, tokens: float, beside_s: float) -> float:
        """Return the seconds that attention over prompt tokens waits for KV of the other context-parallel ranks.

        The ranks pass the KV in a ring, and meanwhile attend to the KV that they have (for `beside_s` seconds).
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

    def share_s(self, queries: float) -> float:
        """Return the seconds in which ranks that share the tokens of a KV head gather queries and exchange results.

        Each moves (dcp - 1) / dcp of the values of the group, so both together move what an all-reduce moves.
        """
        parallel, latent = self.parallel, self.model.latent
        if parallel.dcp == 1 or queries <= 0:
            return 0.0
        width = latent.kv_lora + latent.rope if latent is not None else self.model.head_dim
        heads = self.model.heads / parallel.tp * parallel.dcp
        return self.hardware.all_reduce_s(VALUE_BYTES * queries * heads * width, parallel.dcp)

    def share_prompts_s(self, *, tokens: float, chunks: float, pairs: float) -> float:
        """Return the seconds of their exchange for prompts: as for decodes, but they gather latents (MLA)."""
        parallel, latent = self.parallel, self.model.latent
        if latent is None or parallel.dcp == 1 or tokens <= 0:
            return self.share_s(tokens)
        keys = tokens + _cached_tokens(tokens, tokens / chunks, pairs)
        gathered_bytes = VALUE_BYTES * keys * (latent.kv_lora + latent.rope)
        return self.hardware.all_reduce_s(gathered_bytes / 2, parallel.dcp)  # a gather moves half of what a sum moves

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
        bytes_per_s = kernels.decode_ratio * self.hardware.memory_bytes_per_s * parallel.cp * parallel.dcp
        if model.latent is None:
            return 2 * max(1.0, model.kv_heads / parallel.tp) * model.head_dim * each / bytes_per_s
        latent = model.latent
        flops = 2 * model.heads / parallel.tp * (2 * latent.kv_lora + latent.rope)
        compute_s = flops / (LATENT_COMPUTE_RATIO * self.hardware.bf16_flops * parallel.cp)
        return max((latent.kv_lora + latent.rope) * each / bytes_per_s, compute_s)


def _cached_tokens(tokens: float, mean: float, pairs: float) -> float:
    """Return the tokens before all chunks together, for chunks of `mean` tokens."""
    return max(0.0, (pairs - tokens * (mean + 1) / 2) / mean)


@dataclass(frozen=True, slots=True)
class Product:
    """One GPU's share of a matrix product [tokens, k] x [k, n]."""

    n: float
    k: float


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Times of the layers of one worker."""

    model: ModelShape
    hardware: Hardware
    parallel: Parallel
    precision: Precision
    measured: Curve | None = None
    """Measured seconds of a layer's products and elementwise work, by tokens. None: estimated from the GPU's peaks."""

    @property
    def stage_ratio(self) -> float:
        """Share of the layers in the longest pipeline stage."""
        return -(-self.model.layers // self.parallel.pp) / self.model.layers

    def stage_s(self, rank_tokens: float, stage_tokens: float) -> float:
        """Return the seconds of the layers of one stage, without attention kernels.

        `rank_tokens`: tokens of one tensor-parallel group. `stage_tokens`: tokens of all groups that share experts.
        """
        if rank_tokens <= 0:
            return 0.0
        model = self.model
        if self.measured is not None:
            layer_s = self.measured.at(rank_tokens) + 2 * self._all_reduce_s(rank_tokens)
            return self.stage_ratio * model.layers * layer_s
        always_s = self._products_s(self._attention_products(), rank_tokens) + self._elementwise_s(rank_tokens)
        always_s += self._all_reduce_s(rank_tokens)
        dense_s = expert_s = 0.0
        if model.layers > model.expert_layers:
            dense_s = self._products_s(self._mlp_products(model.ffn), rank_tokens) + self._all_reduce_s(rank_tokens)
        if model.expert_layers:
            expert_s = self._experts_s(rank_tokens, stage_tokens)
        dense_layers = model.layers - model.expert_layers
        whole_s = model.layers * always_s + dense_layers * dense_s + model.expert_layers * expert_s
        return self.stage_ratio * whole_s

    def exchange_s(self, rank_tokens: float) -> float:
        """Return the part of `stage_s` in which GPUs wait for each other: sums, and the exchange of experts' tokens."""
        model, sum_s = self.model, self._all_reduce_s(rank_tokens)
        sums = model.layers + (model.layers - model.expert_layers)
        experts_s = model.expert_layers * self._exchange_s(rank_tokens) if model.expert_layers else 0.0
        return self.stage_ratio * (sums * sum_s + experts_s)

    def alone_s(self, tokens: float) -> float:
        """Return the seconds of one dense layer's products and elementwise work."""
        products = [*self._attention_products(), *self._mlp_products(self.model.ffn)]
        return self._products_s(products, tokens) + self._elementwise_s(tokens)

    def head_s(self, sequences: float) -> float:
        """Return the seconds to compute the logits of this many positions."""
        if sequences <= 0:
            return 0.0
        return self._product_s(Product(self.model.vocab / self.parallel.tp, self.model.d), sequences)

    def send_s(self, rank_tokens: float) -> float:
        """Return the seconds to send the activations to the next stage."""
        if self.parallel.pp == 1:
            return 0.0
        size_bytes = rank_tokens * self.model.d * VALUE_BYTES / self.parallel.tp
        bytes_per_s = self.hardware.between_bytes_per_s(self.parallel.gpus)
        return self.hardware.p2p_latency_s + size_bytes / bytes_per_s

    def _attention_products(self) -> list[Product]:
        model, tp, latent = self.model, self.parallel.tp, self.model.latent
        if latent is None:
            kv_heads = max(1.0, model.kv_heads / tp)
            qkv = (model.heads / tp + 2 * kv_heads) * model.head_dim
            return [Product(qkv, model.d), Product(model.d, model.heads * model.head_dim / tp)]
        heads = model.heads / tp
        query = heads * (latent.nope + latent.rope)
        q = (
            [Product(latent.q_lora, model.d), Product(query, latent.q_lora)]
            if latent.q_lora
            else [Product(query, model.d)]
        )
        down = Product(latent.kv_lora + latent.rope, model.d)
        up = Product(heads * (latent.nope + latent.v), latent.kv_lora)
        # Expands the latent for prompts. Absorbing it into query and output for decodes is the same work.
        return [*q, down, up, Product(model.d, heads * latent.v)]

    def _mlp_products(self, ffn: int) -> list[Product]:
        tp = self.parallel.tp
        return [Product((2 if self.model.gated else 1) * ffn / tp, self.model.d), Product(self.model.d, ffn / tp)]

    def _products_s(self, products: list[Product], tokens: float) -> float:
        return sum(self._product_s(product, tokens) for product in products)

    def _product_s(self, product: Product, tokens: float) -> float:
        weights_bytes = product.n * product.k * FORMAT_BYTES[self.precision.weights]
        moved_bytes = weights_bytes + tokens * (product.n * VALUE_BYTES + product.k * self._input_bytes)
        return self._roof_s(2 * tokens * product.n * product.k, moved_bytes)

    @property
    def _input_bytes(self) -> int:
        """Bytes to move per input value of a product. An fp8 product reads 1 byte, after a kernel has quantized it."""
        return 1 + QUANTIZE_BYTES if self.precision.weights == "fp8" else VALUE_BYTES

    def _roof_s(self, flops: float, moved_bytes: float) -> float:
        kernels = self.hardware.kernels
        compute_s = flops / self.hardware.product_flops(self.precision.weights)
        memory_s = moved_bytes / (kernels.memory_ratio * self.hardware.memory_bytes_per_s)
        if kernels.norm == 0:
            return kernels.launch_s + max(compute_s, memory_s)
        return kernels.launch_s + (compute_s**kernels.norm + memory_s**kernels.norm) ** (1 / kernels.norm)

    def _elementwise_s(self, tokens: float) -> float:
        model, tp, experts = self.model, self.parallel.tp, self.model.experts
        dense = (model.layers - model.expert_layers) / model.layers * model.ffn
        routed = (
            model.expert_layers / model.layers * (experts.active + experts.shared) * experts.ffn if experts else 0.0
        )
        values = 6 * model.d + 3 * (dense + routed) / tp + 4 * (model.heads + model.kv_heads) * model.head_dim / tp
        bytes_per_s = ELEMENTWISE_RATIO * self.hardware.memory_bytes_per_s
        return VALUE_BYTES * tokens * values / bytes_per_s + ELEMENTWISE_S

    def _all_reduce_s(self, tokens: float) -> float:
        return self.hardware.all_reduce_s(VALUE_BYTES * tokens * self.model.d, self.parallel.tp)

    def _experts_s(self, rank_tokens: float, stage_tokens: float) -> float:
        """Return the seconds of routed experts on the fullest GPU, shared experts, and the exchange of tokens."""
        model, experts, parallel = self.model, self.model.experts, self.parallel
        assert experts is not None
        split = parallel.stage_gpus / parallel.ep
        distinct = experts.experts / parallel.ep * (1 - experts.idle_ratio(stage_tokens))
        rows = stage_tokens * experts.active / parallel.ep
        weights_bytes = distinct * model.expert_params / split * FORMAT_BYTES[self.precision.weights]
        moved_bytes = weights_bytes + rows * (2 * model.d + 3 * experts.ffn / split) * VALUE_BYTES
        routed_s = self.hardware.kernels.launch_s + self._roof_s(2 * rows * model.expert_params / split, moved_bytes)
        router_s = self._product_s(Product(experts.experts, model.d), rank_tokens)
        shared_s = (
            self._products_s(self._mlp_products(experts.shared * experts.ffn), rank_tokens) if experts.shared else 0.0
        )
        return router_s + routed_s + shared_s + self._exchange_s(rank_tokens)

    def _exchange_s(self, rank_tokens: float) -> float:
        """Return the seconds of both all-to-alls, or of the all-reduce if every GPU has all tokens."""
        model, experts, parallel, hardware = self.model, self.model.experts, self.parallel, self.hardware
        if parallel.dp * parallel.cp == 1:
            return self._all_reduce_s(rank_tokens)
        assert experts is not None
        there_and_back_bytes = FORMAT_BYTES["fp8" if self.precision.weights == "fp8" else "bf16"] + VALUE_BYTES
        row_bytes = rank_tokens / parallel.tp * model.d * there_and_back_bytes
        gpus = parallel.stage_gpus
        inside_bytes = row_bytes * experts.active * (gpus - 1) / gpus
        nodes = gpus / hardware.gpus_per_node
        if nodes <= 1:
            return 2 * hardware.p2p_latency_s + inside_bytes / hardware.intra_node_bytes_per_s
        visited = nodes * (1 - (1 - 1 / nodes) ** experts.active) * (nodes - 1) / nodes
        # A token is sent to each node once, for all of its experts there.
        if experts.nodes_max:
            visited = min(visited, experts.nodes_max)
        outside_s = row_bytes * visited / hardware.inter_node_bytes_per_s
        return 4 * hardware.p2p_latency_s + max(outside_s, inside_bytes / hardware.intra_node_bytes_per_s)
