"""Load a model for the native engine, and check whether the engine supports it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.model_config import Latent
from baton.compute.models.open_model import open_model
from baton.compute.native.engine import NativeEngine
from baton.compute.native.library import DTYPE_CODES, KV_DTYPE_CODES, NativeLatentSizes, NativeLibrary, NativeModel
from baton.compute.native.matrices import MatrixReader
from baton.compute.native.weights import NativeWeightLoader
from baton.core.config import WeightsChoice
from baton.decide.kv.layout import KVLayout

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2moe", "qwen3moe", "deepseek2", "deepseek3")
HEAD_DIM_MAX = 1024
"""Equal to the constant in native/types.h."""


def native_problem(card: ModelCard, layout: KVLayout, device: str) -> str:
    """Return the reason why the native engine does not support this model with this layout, or an empty string."""
    if device != "cpu":
        return f"the native engine computes on the CPU, and the device is {device}"
    if card.architecture not in ARCHITECTURES:
        return f"the native engine serves {', '.join(ARCHITECTURES)}, and not {card.architecture}"
    if layout.ranks > 1:
        return f"the native engine computes whole models, and this worker has {layout.ranks} ranks"
    if layout != card.layout(block_tokens=layout.block_tokens, dtype=layout.dtype):
        return "the arena's layout is not that of the model"
    if layout.dtype not in KV_DTYPE_CODES:
        return f"the native engine stores KV as {' or '.join(KV_DTYPE_CODES)}, and not as {layout.dtype}"
    if card.head_dim % 2 or card.head_dim > HEAD_DIM_MAX:
        return f"the native engine has even head_dim up to {HEAD_DIM_MAX}, and the model has {card.head_dim}"
    return ""


def load_native_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview,
    library: NativeLibrary,
    *,
    dtype: Dtype,
    threads: int,
) -> NativeEngine:
    """Load a model with dense weights. dtype: the type of weights and products. See `load_engine` for the others."""
    return _load(card, layout, memory, library, _Computation(dtype, threads, "dense"))


def load_quantized_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview,
    library: NativeLibrary,
    *,
    weights: WeightsChoice,
    threads: int,
) -> NativeEngine:
    """Load a model with quantized weights and integer products. See `load_engine` for the arguments.

    Values between products are float32 if KV is, else bfloat16.
    """
    dtype: Dtype = "float32" if layout.dtype == "float32" else "bfloat16"
    return _load(card, layout, memory, library, _Computation(dtype, threads, weights))


@dataclass(frozen=True, slots=True)
class _Computation:
    """The precision and the threads of an engine."""

    dtype: Dtype
    threads: int
    weights: WeightsChoice


def _load(
    card: ModelCard, layout: KVLayout, memory: memoryview, library: NativeLibrary, computed: _Computation
) -> NativeEngine:
    dtype, threads = computed.dtype, computed.threads
    config, weights = open_model(card)
    model = NativeModel(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_tokens,
        rms_eps=config.rms_eps,
        dtype=DTYPE_CODES[dtype],
        kv_dtype=KV_DTYPE_CODES[layout.dtype],
        block_tokens=layout.block_tokens,
        threads=threads,
        kernels=library.kernels.encode(),
        cores=_cores(threads),
        latent=_latent_sizes(config.latent),
    )
    engine = NativeEngine(library, library.new(model), config, layout, memory)
    reader = MatrixReader(weights, dtype, computed.weights)
    NativeWeightLoader(library.weights(engine.handle), config, reader).set_all()
    return engine


def _latent_sizes(latent: Latent | None) -> NativeLatentSizes:
    if latent is None:
        return NativeLatentSizes()
    return NativeLatentSizes(
        q_rank=latent.q_rank or 0,
        kv_rank=latent.kv_rank,
        rope_dim=latent.rope_dim,
        nope_dim=latent.nope_dim,
        value_dim=latent.value_dim,
        score_scale=latent.score_scale,
    )


def _cores(threads: int) -> ctypes.Array[ctypes.c_int32] | None:
    """Return a core per thread if this process has exactly as many cores. None: the system places the threads."""
    mine = sorted(os.sched_getaffinity(0))
    return (ctypes.c_int32 * threads)(*mine) if len(mine) == threads else None
