"""What a step costs where nobody has measured it on this machine: a model's sizes over rates that were seen on another.

A promised TPOT is held against these prices, so those of another model or engine would refuse what is in time. Who
wants more than the right size measures (`benchmarks/engine_profile.py`) and names the profile in `cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.open_model import read_config
from baton.compute.models.tensor_names import expected_shapes
from baton.core.config import WeightsChoice

EngineKind = Literal["native", "torch", "cuda"]
_WIRE_BYTES_PER_S = 2.3e9
"""Between hosts: what `LinearCost` has for 46 KB a token."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one thread of an engine reads and multiplies in a second; a GPU is one thread."""

    bytes_per_s: float
    flops_per_s: float
    request_s: float = 0.0
    """For each decoding request, beside its products."""
    step_s: float = 0.0


# One core of the CPU of benchmarks/results (native-steps-*.json, engines.json, engine-steps.json).
_NATIVE_FLOAT32 = Rates(26e9, 110e9)
_NATIVE_BFLOAT16 = Rates(25e9, 220e9)
_NATIVE_QUANTIZED = Rates(15e9, 240e9)
_TORCH = Rates(13.8e9, 117e9, request_s=0.003)
_CUDA = Rates(1.5e12, 2e14, step_s=0.005)
"""Half of what a GPU of 2023 can do, and the launches of a step: nobody has measured ours on one."""
_PAIR_RATIO = 0.65
"""Attention's share of the rate of products, where a prompt is computed (prefill of 2,048 tokens against 512)."""
_MORE_THREADS = 0.4
"""Exponent of the threads, in bytes a second: a step of one request on two of them reads 1.2 to 1.3 times as fast."""


def estimated_costs(
    card: ModelCard, *, kind: EngineKind, dtype: Dtype, weights: WeightsChoice, threads: int, kv_token_bytes: int
) -> dict[str, float]:
    """Return the keys of `LinearCost` for a model on one of our engines. Nothing for the hash engine: it is no model.

    threads: those of one worker, which say nothing of a GPU. kv_token_bytes: KV of a token, in all layers.
    """
    if card.format == "hash":
        return {}
    if kind == "cuda":
        threads = 1
    config, rates = read_config(card), _rates(kind, dtype, weights)
    held, used = _parameters(config)
    bytes_each = _weight_bytes(card, held, dtype, weights)
    bytes_per_s = rates.bytes_per_s * threads**_MORE_THREADS
    flops_per_s = rates.flops_per_s * threads
    head = config.hidden * config.vocab_tokens  # of a prompt, only the last token passes it
    pair_flops = 4.0 * config.layers * config.heads * config.head_dim
    return {
        "step_overhead_s": rates.step_s + used * bytes_each / bytes_per_s,
        "prefill_token_s": 2.0 * (used - head) / flops_per_s,
        "prefill_pair_s": pair_flops / (_PAIR_RATIO * flops_per_s),
        "decode_request_s": 2.0 * used / flops_per_s + rates.request_s,
        "context_token_s": kv_token_bytes / bytes_per_s,
        "handoff_token_s": kv_token_bytes / _WIRE_BYTES_PER_S,
    }


def _rates(kind: EngineKind, dtype: Dtype, weights: WeightsChoice) -> Rates:
    match kind:
        case "cuda":
            return _CUDA
        case "torch":
            return _TORCH
        case "native":
            if weights != "dense":
                return _NATIVE_QUANTIZED
            return _NATIVE_FLOAT32 if dtype == "float32" else _NATIVE_BFLOAT16


def _weight_bytes(card: ModelCard, parameters: float, dtype: Dtype, weights: WeightsChoice) -> float:
    """Bytes of one parameter, as it lies in memory."""
    match weights:
        case "dense":
            return 4.0 if dtype == "float32" else 2.0
        case "int8":
            return 1.0
        case "stored":
            return min(2.0, card.weight_bytes / parameters)


def _parameters(config: ModelConfig) -> tuple[float, float]:
    """Count the parameters of a model, and those that one token meets: an embedding that is no head is looked up."""
    held = used = 0.0
    chosen = config.experts.used / config.experts.count if config.experts is not None else 1.0
    for name, shape in expected_shapes(config).items():
        held += prod(shape)
        if name == "model.embed_tokens.weight" and not config.tied_embeddings:
            continue
        used += prod(shape) * (chosen if ".experts." in name else 1.0)
    return held, used
