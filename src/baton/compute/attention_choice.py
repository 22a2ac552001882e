"""The engine and the attention backend that a configuration allows. No torch: the server checks before workers run."""

from __future__ import annotations

import importlib.util

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype, Precision
from baton.compute.models.open_model import read_config
from baton.compute.native.build import build_problem
from baton.compute.native.load_native import native_problem
from baton.core.config import AttentionName
from baton.decide.kv.layout import SCALED, KVLayout

TRITON_FORMS = ("triton", "persistent", "fused")
"""Names of attention by Triton: decode in two launches per layer; in one; in one with the chunks of a mixed step."""
FP8_REASON = "weights are fp8, which the torch engine computes"
FLEX_HEAD_DIM_MAX, FLEX_BLOCK_TOKENS_MIN = 256, 16
"""Limits of torch's compiled flex kernels for GPUs. Untested: no GPU has run them yet."""
FLEX_NUMBERS_MAX = 2**31
"""Numbers of an arena that these kernels can address. They compute offsets in 32 bits, and read other memory beyond."""


def torch_backend(attention: AttentionName, device: str) -> str:
    """Return the attention backend of the torch engine on a device."""
    if attention in ("auto", "native"):
        return "triton" if device.startswith("cuda") else "sdpa"
    return attention


def attention_problem(
    card: ModelCard, layout: KVLayout, device: str, attention: AttentionName, precision: Precision
) -> str:
    """Return why no engine can compute as configured, with what to change. Empty: one can.

    precision: of a worker. The native engine is not compiled to find out.
    """
    if card.format == "hash" or layout.ranks > 1:  # `rank_problems` checks workers of several ranks
        return ""
    other, refusal = torch_backend("auto", device), ""
    if attention in ("auto", "native"):
        is_fp8 = precision.weights == "fp8"
        refusal = FP8_REASON if is_fp8 else native_problem(card, layout, device) or build_problem()
        if not refusal:
            return ""
        if attention == "native":
            return f"--attention-backend native cannot be used: {refusal}; use --attention-backend {other}"
    if precision.weights == "fp8" and (problem := fp8_weights_problem(card)):
        return problem
    if precision.weights not in ("dense", "fp8"):
        why = refusal or f"attention is {attention}"
        return f"weights = {precision.weights!r} needs the native engine: {why}; use weights = 'dense'"
    if layout.dtype in SCALED and layout.dtype != "fp8":
        why = f" ({refusal})" if refusal else f", and --attention-backend {attention} is of the torch engine"
        return f"KV in {layout.dtype} needs the native engine{why}; use --kv-dtype fp8"
    backend = torch_backend(attention, device)
    if backend in TRITON_FORMS:
        return triton_problem(backend, device, layout)
    return flex_problem(layout, device, precision.dtype) if backend == "flex" else ""


def fp8_weights_problem(card: ModelCard) -> str:
    """Return why a model cannot have weights in fp8. Empty: it can. The torch engine checks the GPU when it loads."""
    if read_config(card).experts is None:
        return ""
    return f"weights = 'fp8' is for models without experts, and {card.name} has experts; use --weights dense"


def triton_problem(backend: str, device: str, layout: KVLayout) -> str:
    """Return why Triton's kernels cannot be used on a device. Empty: they can. backend: one of TRITON_FORMS."""
    if not device.startswith("cuda"):
        return f"--attention-backend {backend} needs a GPU; use --attention-backend sdpa"
    if backend == "fused" and layout.planes == 1:
        return "--attention-backend fused is not for latent attention; use --attention-backend triton"
    if importlib.util.find_spec("triton") is None:
        return "decoding on CUDA needs triton, which CUDA builds of PyTorch bring along; install it: pip install triton"
    return ""


def flex_problem(layout: KVLayout, device: str, dtype: Dtype) -> str:
    """Return why flex attention cannot compute in `dtype` over an arena on a device. Empty: it can."""
    other, on_gpu = f"use --attention-backend {torch_backend('auto', device)}", device.startswith("cuda")
    if layout.dtype != dtype:
        return (
            f"flex attention reads KV in the type of the computation, and KV is {layout.dtype} and the computation "
            f"{dtype}; set --kv-dtype to the value of --dtype, or {other}"
        )
    if on_gpu and (layout.head_dim > FLEX_HEAD_DIM_MAX or layout.block_tokens < FLEX_BLOCK_TOKENS_MIN):
        return (
            f"flex attention on a GPU takes heads of up to {FLEX_HEAD_DIM_MAX} values and blocks of at least "
            f"{FLEX_BLOCK_TOKENS_MIN} tokens; here heads have {layout.head_dim} values and blocks "
            f"{layout.block_tokens} tokens; {other}"
        )
    return ""


def flex_arena_problem(layout: KVLayout, blocks: int, device: str) -> str:
    """Return why flex attention cannot address an arena of this many blocks on a device. Empty: it can.

    Source: https://github.com/pytorch/pytorch/issues/190857.
    """
    block_numbers = layout.block_bytes * layout.head_dim // layout.head_bytes
    blocks_max, other = FLEX_NUMBERS_MAX // block_numbers, torch_backend("auto", device)
    if blocks <= blocks_max or not device.startswith("cuda"):
        return ""
    return (
        f"flex attention on a GPU addresses 2^31 numbers, and {blocks} KV blocks have {blocks * block_numbers}; "
        f"set kv.bytes to at most {blocks_max * layout.block_bytes}, or use --attention-backend {other}"
    )
