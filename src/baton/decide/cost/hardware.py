"""Properties of a GPU: peaks, links, price, and the efficiency of kernels on it."""

from __future__ import annotations

from msgspec import Struct

from baton.decide.cost.model import Format

IDLE_RATIO, MEMORY_POWER_RATIO, COMPUTE_POWER_RATIO = 0.30, 0.71, 0.70
"""Shares of a GPU's rated power: when idle, added at full memory bandwidth, and added at full arithmetic.

Fitted to the average power of Splitwise's profile (Llama-2-70B on A100: 0.43 at TP 8, 0.59 at TP 4, 0.73 at TP 2 while
decoding; 1.0 at the peak of a prompt).
"""


class Kernels(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured efficiency of kernels, as shares of a GPU's peaks.

    Source: fits over AIConfigurator's operator data (kernels of vLLM 0.14, bf16).
    """

    name: str
    compute_ratio: float
    """Share of the peak FLOP/s of large matrix products."""
    fp8_compute_ratio: float
    """Share of the peak fp8 FLOP/s of large matrix products, without the quantization of their inputs."""
    memory_ratio: float
    """Share of the peak memory bandwidth of small matrix products."""
    launch_s: float
    """Fixed time of a matrix product."""
    norm: int
    """Combination of compute and memory time: (a^norm + b^norm)^(1/norm). 0: the larger of the two."""
    prompt_ratio: float
    """Share of the peak FLOP/s of attention over a long prompt."""
    prompt_half_tokens: float
    """Prompt length at which attention reaches half of `prompt_ratio`."""
    decode_ratio: float
    """Share of the peak memory bandwidth of decode attention."""
    attention_s: float
    """Fixed time of an attention kernel."""


class Links(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured all-reduce inside a node: start-up seconds and bytes per second by number of GPUs."""

    name: str
    intra_node_bytes_per_s: float
    """Link bandwidth of the measured GPUs. Results for other GPUs are scaled by their bandwidth."""
    reduce: dict[str, tuple[float, float]]

    def all_reduce_s(self, size_bytes: float, gpus: int) -> float:
        """Return the seconds of an all-reduce among `gpus` of one node, from the next larger measured count."""
        if gpus <= 1:
            return 0.0
        counts = sorted(int(count) for count in self.reduce)
        start_s, bytes_per_s = self.reduce[str(next((count for count in counts if count >= gpus), counts[-1]))]
        return start_s + 2 * (gpus - 1) / gpus * size_bytes / bytes_per_s


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of GPU, in its usual node."""

    name: str
    kernels: Kernels
    links: Links
    bf16_flops: float
    fp8_flops: float | None = None
    int8_flops: float | None = None
    memory_bytes_per_s: float
    memory_bytes: float
    gpu_w: float
    """Rated power of one GPU."""
    gpus_per_node: int = 8
    inter_node_bytes_per_s: float
    """Per GPU, one direction."""
    intra_node_bytes_per_s: float
    """Per GPU, one direction."""
    p2p_latency_s: float = 1e-5
    usd_per_hour: float | None = None
    """Price of one GPU with its share of the node. None: unknown."""
    node_w: float | None = None
    """Rated power of a whole node. None: unknown."""
    note: str = ""
    """The GPU that its constants are taken from, if it was not measured itself."""

    def flops(self, weights: Format) -> float:
        """Return the peak FLOP/s of matrix products with such weights. Unsupported formats run in bf16."""
        if weights == "fp8" and self.fp8_flops is not None:
            return self.fp8_flops
        if weights == "int8" and self.int8_flops is not None:
            return self.int8_flops
        return self.bf16_flops

    def product_flops(self, weights: Format) -> float:
        """Return the FLOP/s that large matrix products with such weights reach."""
        is_fp8 = weights == "fp8" and self.fp8_flops is not None
        return self.flops(weights) * (self.kernels.fp8_compute_ratio if is_fp8 else self.kernels.compute_ratio)

    @property
    def gpu_share_w(self) -> float:
        """Rated power of one GPU with its share of CPUs, fans and network."""
        return self.node_w / self.gpus_per_node if self.node_w is not None else 1.6 * self.gpu_w

    def power_w(self, *, compute_ratio: float, memory_ratio: float) -> float:
        """Return the power draw of one GPU at these shares of its peaks, in watts; at most its rating."""
        share = IDLE_RATIO + COMPUTE_POWER_RATIO * compute_ratio + MEMORY_POWER_RATIO * memory_ratio
        return self.gpu_w * min(1.0, share)

    def all_reduce_s(self, size_bytes: float, gpus: int) -> float:
        """Return the seconds of an all-reduce among `gpus`: first inside each node, then between nodes."""
        inside = min(gpus, self.gpus_per_node)
        scale = self.intra_node_bytes_per_s / self.links.intra_node_bytes_per_s
        inside_s = self.links.all_reduce_s(size_bytes / scale, inside)
        if gpus <= self.gpus_per_node:
            return inside_s
        nodes = gpus / self.gpus_per_node
        between_bytes = 2 * (nodes - 1) / nodes * size_bytes / inside
        return inside_s + 2 * self.p2p_latency_s + between_bytes / self.inter_node_bytes_per_s

    def between_bytes_per_s(self, gpus: int) -> float:
        """Return the bandwidth per GPU among `gpus`: the intra-node link, or the inter-node link for several nodes."""
        return self.intra_node_bytes_per_s if gpus <= self.gpus_per_node else self.inter_node_bytes_per_s
