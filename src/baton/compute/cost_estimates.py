"""Estimate the cost of a step from the sizes of a model and rates measured on another machine.

The policies compare TPOT targets with these estimates, so they must fit the served model and engine. For exact numbers,
measure a profile (`benchmarks/engine_profile.py`) and name it in the configuration key `cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import FP8_WIDTH, Dtype
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.open_model import read_config
from baton.compute.models.tensor_names import expected_shapes
from baton.core.config import WeightsChoice

EngineKind = Literal["native", "torch", "cuda"]
_WIRE_BYTES_PER_S = 2.3e9
"""Rate of transfers between hosts. With 46 KB of KV per token, it gives the default time of `LinearCost`."""


@dataclass(frozen=True, slots=True)
class EngineRates:
    """The rates of one thread of an engine. A GPU counts as one thread."""

    bytes_per_s: float
    flops_per_s: float
    request_s: float = 0.0
    """The time per decoding request, in addition to its matrix products."""
    step_s: float = 0.0
    """Fixed time of a step, to which each request adds its own."""


# Rates of one core of the CPU in benchmarks/results (native-steps-*.json, engines.json, engine-steps.json).
_NATIVE_FLOAT32 = EngineRates(26e9, 110e9)
_NATIVE_BFLOAT16 = EngineRates(25e9, 220e9)
_NATIVE_QUANTIZED = EngineRates(15e9, 240e9)
_TORCH = EngineRates(13.8e9, 117e9, request_s=0.003)
_CUDA = EngineRates(1.5e12, 2e14, step_s=0.005)
"""Rates of a GPU: half the peak of a GPU of 2023, and the launches of a step's kernels. Not measured."""
_PAIR_RATIO = 0.65
"""Rate of attention relative to matrix products in prefill. Measured: prompts of 2,048 tokens against 512."""
_MORE_THREADS = 0.4
"""Memory bandwidth grows with the number of threads to this power: two threads read 1.3 times as fast as one."""


def estimated_costs(
    card: ModelCard, *, kind: EngineKind, dtype: Dtype, weights: WeightsChoice, threads: int, kv_token_bytes: int
) -> dict[str, float]:
    """Return the keys of `LinearCost` for a model on one of Baton's engines, or nothing for the hash engine.

    threads: of one worker; ignored for a GPU. kv_token_bytes: the KV of one token in all layers.
    """
    if card.format == "hash":
        return {}
    if kind == "cuda":
        threads = 1
    config, rates = read_config(card), _rates(kind, dtype, weights)
    held, used = _parameter_counts(config)
    bytes_each = _weight_bytes(card, held, dtype, weights)
    bytes_per_s = rates.bytes_per_s * threads**_MORE_THREADS
    flops_per_s = rates.flops_per_s * threads
    head = config.hidden * config.vocab_tokens  # only the last token of a prompt needs it
    pair_flops = 4.0 * config.layers * config.heads * config.head_dim
    return {
        "step_overhead_s": rates.step_s + used * bytes_each / bytes_per_s,
        "prefill_token_s": 2.0 * (used - head) / flops_per_s,
        "prefill_pair_s": pair_flops / (_PAIR_RATIO * flops_per_s),
        "decode_request_s": 2.0 * used / flops_per_s + rates.request_s,
        "context_token_s": kv_token_bytes / bytes_per_s,
        "handoff_token_s": kv_token_bytes / _WIRE_BYTES_PER_S,
    }


def weights_bytes(card: ModelCard, dtype: Dtype, weights: WeightsChoice) -> int:
    """Return the expected memory of one worker's weights; 0 for the hash engine."""
    if card.format == "hash":
        return 0
    held, _ = _parameter_counts(read_config(card))
    return round(held * _weight_bytes(card, held, dtype, weights))


def _rates(kind: EngineKind, dtype: Dtype, weights: WeightsChoice) -> EngineRates:
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
    """Return the bytes that one parameter takes in memory."""
    match weights:
        case "dense":
            return 4.0 if dtype == "float32" else 2.0
        case "int8":
            return 1.0
        case "stored":
            return min(2.0, card.weight_bytes / parameters)
        case "fp8":
            return _fp8_bytes(read_config(card), dtype) / parameters


def _fp8_bytes(config: ModelConfig, dtype: Dtype) -> float:
    """Return the bytes of a model whose layers' products have weights in fp8, with a float32 scale per output.

    Embeddings, the output projection, norms, biases and the up-projections of latents stay in `dtype`.
    """
    total, wide = 0.0, 4 if dtype == "float32" else 2
    for name, shape in expected_shapes(config).items():
        is_product = name.startswith("model.layers.") and len(shape) > 1 and ".kv_b_proj." not in name
        is_fp8 = is_product and not any(size % FP8_WIDTH for size in shape)
        total += prod(shape) + 4 * shape[0] if is_fp8 else wide * prod(shape)
    return total


def _parameter_counts(config: ModelConfig) -> tuple[float, float]:
    """Return the number of parameters, and of those that one token uses.

    An embedding table that is not also the output projection does not count as used, because a token reads one row of
    it.
    """
    held = used = 0.0
    chosen = config.experts.per_token / config.experts.count if config.experts is not None else 1.0
    for name, shape in expected_shapes(config).items():
        held += prod(shape)
        if name == "model.embed_tokens.weight" and not config.tied_embeddings:
            continue
        used += prod(shape) * (chosen if ".experts." in name else 1.0)
    return held, used
