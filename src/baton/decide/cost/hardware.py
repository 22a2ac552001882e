"""What a GPU can do: its peaks, its links, its price, and how much of the peaks kernels reach on it."""

from __future__ import annotations

from msgspec import Struct

from baton.decide.cost.model import Format

IDLE_RATIO, MEMORY_POWER_RATIO, COMPUTE_POWER_RATIO = 0.30, 0.71, 0.70
"""Share of a GPU's rated power: doing nothing, added by full memory bandwidth, added by full arithmetic.

Fitted to the average power of Splitwise's profile (Llama-2-70B on A100: 0.43 at TP 8, 0.59 at TP 4, 0.73 at TP 2 while
decoding; 1.0 at the peak of a prompt).
"""


class Kernels(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What measured kernels reach of a GPU's peaks.

    Source: fits over AIConfigurator's operator data (kernels of vLLM 0.14, bf16).
    """

    name: str
    compute_ratio: float
    """Of the peak FLOP/s, by large matrix products."""
    memory_ratio: float
    """Of the peak memory bandwidth, by small ones."""
    launch_s: float
    """One matrix product of no size."""
    norm: int
    """How compute and memory time add up: (a^norm + b^norm)^(1/norm). 0: the larger of the two."""
    prompt_ratio: float
    """Of the peak FLOP/s, by attention over a long prompt."""
    prompt_half_tokens: float
    """Prompt length at which attention reaches half of that."""
    decode_ratio: float
    """Of the peak memory bandwidth, by attention of decoding requests."""
    attention_s: float
    """One attention kernel of no size."""


class Links(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All-reduce inside a node, measured: by number of GPUs, start-up seconds and bytes per second."""

    name: str
    intra_node_bytes_per_s: float
    """Of the GPUs that it was measured on; others are scaled by theirs."""
    reduce: dict[str, tuple[float, float]]

    def all_reduce_s(self, size_bytes: float, gpus: int) -> float:
        """Seconds of an all-reduce among `gpus` of one node. Between measured counts: the next larger one's figures."""
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
    """Of one GPU with its share of the node. None: no published price at hand."""
    node_w: float | None = None
    """Rated power of a whole node, where it is known."""
    note: str = ""
    """Where its constants are borrowed from, if they are."""

    def flops(self, weights: Format) -> float:
        """Peak FLOP/s of matrix products with such weights. A format that it cannot multiply runs in bf16."""
        if weights == "fp8" and self.fp8_flops is not None:
            return self.fp8_flops
        if weights == "int8" and self.int8_flops is not None:
            return self.int8_flops
        return self.bf16_flops

    @property
    def gpu_share_w(self) -> float:
        """Rated power of one GPU with its share of CPUs, fans and network: what a rack must provide for it."""
        return self.node_w / self.gpus_per_node if self.node_w is not None else 1.6 * self.gpu_w

    def power_w(self, *, compute_ratio: float, memory_ratio: float) -> float:
        """Draw of one GPU at this share of its peaks, at most its rating."""
        share = IDLE_RATIO + COMPUTE_POWER_RATIO * compute_ratio + MEMORY_POWER_RATIO * memory_ratio
        return self.gpu_w * min(1.0, share)

    def all_reduce_s(self, size_bytes: float, gpus: int) -> float:
        """Seconds of an all-reduce among `gpus`. Past one node, a second one between nodes follows the one inside."""
        inside = min(gpus, self.gpus_per_node)
        scale = self.intra_node_bytes_per_s / self.links.intra_node_bytes_per_s
        inside_s = self.links.all_reduce_s(size_bytes / scale, inside)
        if gpus <= self.gpus_per_node:
            return inside_s
        nodes = gpus / self.gpus_per_node
        between_bytes = 2 * (nodes - 1) / nodes * size_bytes / inside
        return inside_s + 2 * self.p2p_latency_s + between_bytes / self.inter_node_bytes_per_s

    def between_bytes_per_s(self, gpus: int) -> float:
        """What one of `gpus` that exchange data reaches: the inner link inside a node, the outer one past it."""
        return self.intra_node_bytes_per_s if gpus <= self.gpus_per_node else self.inter_node_bytes_per_s
