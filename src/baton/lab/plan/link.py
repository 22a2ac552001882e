"""Judge the link between prefill and decode: break-even bandwidth, handoff time, buffer size."""

from __future__ import annotations

from msgspec import Struct

from baton.decide.cost.handoff import HandoffLink, break_even_bytes_per_s, buffer_bytes
from baton.decide.cost.model import FORMAT_BYTES
from baton.lab.plan.demand import WorkloadDemand
from baton.lab.plan.options import WorkerOption
from baton.lab.plan.solve import link_bytes_per_s


class LinkAdvice(Struct, frozen=True, kw_only=True):
    """Handoff figures for one kind of prefill worker."""

    option: str
    bytes_per_s: float
    """Bandwidth of the worker's link."""
    break_even_bytes_per_s: float
    """Below this bandwidth, transferring a mean prompt's KV takes longer than computing it on this worker."""
    peak_break_even_bytes_per_s: float
    """Break-even bandwidth at the GPUs' peak FLOP/s. Source: Mooncake, equation 2."""
    handoff_s: float
    """Transfer time of a mean prompt's KV."""
    prefill_s: float
    """Prefill time of a mean prompt."""
    kv_bytes: float
    """KV size of a mean prompt."""
    buffer_bytes: int
    """Size of a fixed transfer buffer for the longest prompts (p99)."""

    @property
    def is_slower_than_prefill(self) -> bool:
        """Transferring the KV takes longer than computing it."""
        return self.bytes_per_s < self.break_even_bytes_per_s


def link_advice(option: WorkerOption, demand: WorkloadDemand, *, same_host: bool) -> LinkAdvice:
    """Return the handoff figures of a prefill worker for the mean prompt."""
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
    """Return the advice as one sentence."""
    have, need = advice.bytes_per_s / 1e9, advice.break_even_bytes_per_s / 1e9
    facts = (
        f"a prompt of {tokens} tokens leaves {advice.kv_bytes / 2**20:.0f} MiB of KV: {advice.handoff_s * 1e3:.1f} ms "
        f"over {have:.1f} GB/s, {advice.prefill_s * 1e3:.1f} ms to compute"
    )
    if advice.is_slower_than_prefill:
        return f"the link makes disaggregation pointless: {facts}; it would need more than {need:.1f} GB/s"
    return f"the link is wide enough: {facts}; the break-even is at {need:.2f} GB/s"
