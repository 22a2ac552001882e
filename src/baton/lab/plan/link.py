"""Whether the way between prefill and decode is wide enough: break-even bandwidth, exposed time, buffers."""

from __future__ import annotations

from msgspec import Struct

from baton.decide.cost.handoff import HandoffLink, break_even_bytes_per_s, buffer_bytes
from baton.decide.cost.model import FORMAT_BYTES
from baton.lab.plan.demand import WorkloadDemand
from baton.lab.plan.options import WorkerOption
from baton.lab.plan.solve import link_bytes_per_s


class LinkAdvice(Struct, frozen=True, kw_only=True):
    """What is known about handoffs of one kind of prefill worker."""

    option: str
    bytes_per_s: float
    """What the worker has."""
    break_even_bytes_per_s: float
    """Below this, moving a mean prompt's KV takes longer than computing it, as this worker does."""
    peak_break_even_bytes_per_s: float
    """As Mooncake's equation 2 has it: at the GPUs' peak arithmetic."""
    handoff_s: float
    """Of a mean prompt."""
    prefill_s: float
    """Of the same."""
    kv_bytes: float
    """Of the same."""
    buffer_bytes: int
    """A fixed transfer buffer for the longest prompts (p99)."""

    @property
    def pointless(self) -> bool:
        """Moving the KV takes longer than computing it."""
        return self.bytes_per_s < self.break_even_bytes_per_s


def link_advice(option: WorkerOption, demand: WorkloadDemand, *, same_host: bool) -> LinkAdvice:
    """Judge the link of a prefill worker for the mean prompt."""
    cost, tokens = option.cost, round(demand.input_tokens)
    model = cost.model
    inside = cost.hardware.intra_node_bytes_per_s * cost.parallel.gpus
    bytes_per_s = inside if same_host else link_bytes_per_s(option)
    prefill_s = cost.prefill_s(new_tokens=tokens, cached_tokens=0)
    peak_s = model.prompt_flops(tokens) / (cost.parallel.gpus * cost.hardware.bf16_flops)
    heads, width = (model.kv_heads, model.head_dim) if model.latent is None else (1, model.kv_values() / 2)
    return LinkAdvice(
        option=option.name,
        bytes_per_s=bytes_per_s,
        break_even_bytes_per_s=break_even_bytes_per_s(
            token_bytes=cost.kv_token_bytes, saved_s=prefill_s, tokens=tokens
        ),
        peak_break_even_bytes_per_s=break_even_bytes_per_s(
            token_bytes=cost.kv_token_bytes, saved_s=peak_s, tokens=tokens
        ),
        handoff_s=(cost.wire or HandoffLink(bytes_per_s=bytes_per_s)).transfer_s(
            tokens=tokens, token_bytes=cost.kv_token_bytes
        ),
        prefill_s=prefill_s,
        kv_bytes=tokens * cost.kv_token_bytes,
        buffer_bytes=buffer_bytes(
            layers=model.layers, tokens=demand.input_quantile(0.99), kv_heads=heads, head_dim=round(width),
            value_bytes=FORMAT_BYTES[cost.precision.kv],
        ),
    )  # fmt: skip


def describe_link(advice: LinkAdvice, *, tokens: int) -> str:
    """The same as a sentence."""
    have, need = advice.bytes_per_s / 1e9, advice.break_even_bytes_per_s / 1e9
    facts = (
        f"a prompt of {tokens} tokens leaves {advice.kv_bytes / 2**20:.0f} MiB of KV: {advice.handoff_s * 1e3:.1f} ms "
        f"over {have:.1f} GB/s, {advice.prefill_s * 1e3:.1f} ms to compute"
    )
    if advice.pointless:
        return f"the link makes disaggregation pointless: {facts}; it would need more than {need:.1f} GB/s"
    return f"the link is wide enough: {facts}; the break-even is at {need:.2f} GB/s"
