"""Load a model for the native engine, and check whether the engine supports it."""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.model_config import Latent
from baton.compute.models.open_model import open_model
from baton.compute.native.engine import NativeEngine
from baton.compute.native.library import (
    DTYPE_CODES,
    KV_DTYPE_CODES,
    NativeLatentSizes,
    NativeLibrary,
    NativeModel,
    NativeWeights,
)
from baton.compute.native.matrices import MatrixReader
from baton.compute.native.weights import NativeWeightLoader
from baton.core.config import WeightsChoice
from baton.core.errors import ModelError
from baton.decide.kv.layout import KVLayout
from baton.move.weights_file import WeightsFile

log = logging.getLogger("baton.worker")

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2moe", "qwen3moe", "deepseek2", "deepseek3")
HEAD_DIM_MAX = 1024
"""Maximum of head_dim. Equal to the constant in native/types.h."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """The precision and the threads of an engine, and the place of its weights."""

    threads: int
    dtype: Dtype = "float32"
    """Type of matrix products. Ignored for quantized weights: float32 if KV is, else bfloat16."""
    weights: WeightsChoice = "dense"
    file: WeightsFile | None = None
    """Shares the packed weights with the other workers of the host. None: this engine has its own copy."""


def load_native_engine(
    card: ModelCard, layout: KVLayout, memory: memoryview, library: NativeLibrary, computation: Computation
) -> NativeEngine:
    """Load a model and return its native engine. `load_engine` describes the arguments."""
    dtype, threads = computation.dtype, computation.threads
    if computation.weights != "dense":
        dtype = "float32" if layout.dtype == "float32" else "bfloat16"
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
    target = library.weights(engine.handle)
    loader = NativeWeightLoader(target, config, MatrixReader(weights, dtype, computation.weights))
    if computation.file is None:
        loader.set_all()
    else:
        _share(target, loader, computation.file, f"{library.path.name} {computation.weights}")
    return engine


def _share(target: NativeWeights, loader: NativeWeightLoader, file: WeightsFile, key: str) -> None:
    """Map the weights from the file. The first worker of a host fills it, while the others wait."""
    with file.locked():
        if not file.is_complete:
            file.clear()
            target.share(file.descriptor, key)
            loader.set_all()
            return
    try:
        target.attach(file.descriptor, key)
    except ModelError as error:  # another version of Baton wrote the file before an upgrade
        log.warning("this worker has its own copy of the weights: %s", error)
        loader.set_all()


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
