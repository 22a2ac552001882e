"""Load the native engine: which models it serves, and their weights into its panels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.core.config import WeightsChoice
from baton.engine.card import ModelCard
from baton.engine.dtype import Dtype
from baton.engine.model_config import Experts, ModelConfig
from baton.engine.native.library import (
    KV_NUMBERS,
    NUMBERS,
    WEIGHT_NUMBERS,
    NativeLayer,
    NativeLibrary,
    NativeMatrix,
    NativeMlp,
    NativeModel,
    NativeRouter,
    NativeWeights,
)
from baton.engine.native_engine import NativeEngine
from baton.engine.quantized import RUN_INPUTS, QuantizedMatrix, quantize_rows, quantize_runs, stacked
from baton.engine.stored import to_bfloat16, to_float32
from baton.engine.tensor_names import ExpertNames, expert_names
from baton.engine.weights import WeightReader, open_model
from baton.kv.layout import KVLayout

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2moe", "qwen3moe")
HEAD_DIM_MAX = 256


def native_refusal(card: ModelCard, layout: KVLayout, device: str) -> str:
    """Say why the native engine does not serve this model with this layout; empty where it does."""
    if device != "cpu":
        return f"the native engine computes on the CPU, and the device is {device}"
    if card.architecture not in ARCHITECTURES:
        return f"the native engine serves {', '.join(ARCHITECTURES)}, and not {card.architecture}"
    if layout.ranks > 1:
        return f"the native engine computes whole models, and this worker has {layout.ranks} ranks"
    if layout != card.layout(block_tokens=layout.block_tokens, dtype=layout.dtype):
        return "the arena's layout is not that of the model"
    if layout.dtype not in KV_NUMBERS:
        return f"the native engine stores KV as {' or '.join(KV_NUMBERS)}, and not as {layout.dtype}"
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
    """See `load_engine`. Weights are computed in `dtype`."""
    return _load(card, layout, memory, library, _Computed(dtype, threads, "dense"))


def load_quantized_engine(
    card: ModelCard,
    layout: KVLayout,
    memory: memoryview,
    library: NativeLibrary,
    *,
    weights: WeightsChoice,
    threads: int,
) -> NativeEngine:
    """See `load_engine`. Products are of integers; what is between them is float32 where KV is, else bfloat16."""
    dtype: Dtype = "float32" if layout.dtype == "float32" else "bfloat16"
    return _load(card, layout, memory, library, _Computed(dtype, threads, weights))


@dataclass(frozen=True, slots=True)
class _Computed:
    """How a model is computed."""

    dtype: Dtype
    threads: int
    weights: WeightsChoice


def _load(
    card: ModelCard, layout: KVLayout, memory: memoryview, library: NativeLibrary, computed: _Computed
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
        number=NUMBERS[dtype],
        kv_number=KV_NUMBERS[layout.dtype],
        block_tokens=layout.block_tokens,
        threads=threads,
        kernels=library.kernels.encode(),
        cores=_cores(threads),
    )
    engine = NativeEngine(library, library.new(model), config, layout, memory)
    reader = _MatrixReader(weights, dtype, computed.weights)
    _Weights(library.weights(engine.handle), config, reader).set_all()
    return engine


def _cores(threads: int) -> ctypes.Array[ctypes.c_int32] | None:
    """Name a core for each thread where this process owns exactly as many; else the system places them."""
    mine = sorted(os.sched_getaffinity(0))
    return (ctypes.c_int32 * threads)(*mine) if len(mine) == threads else None


class _MatrixReader:
    """Reads matrices in the form that they are computed in: dense, as the file stores them, or rounded to 8 bits."""

    def __init__(self, reader: WeightReader, dtype: Dtype, weights: WeightsChoice) -> None:
        self._reader = reader
        self._computed = {"float32": to_float32, "bfloat16": to_bfloat16}[dtype]
        self._weights = weights

    def exact(self, name: str) -> np.ndarray:
        return to_float32(self._reader.read(name))

    def matrix(self, names: list[str]) -> np.ndarray | QuantizedMatrix:
        """Stack matrices that read the same input: [rows, inputs]."""
        parts = [f"{name}.weight" for name in names]
        if self._weights == "dense":
            return _joined([self._computed(self._reader.read(part)) for part in parts])
        if self._weights == "int8":
            return stacked([quantize_rows(_aligned(self._reader.read(part))) for part in parts])
        return stacked([self._stored(part) for part in parts])

    def _stored(self, name: str) -> QuantizedMatrix:
        kept = self._reader.read_quantized(name)
        return quantize_runs(_aligned(self._reader.read(name))) if kept is None else kept


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Put matrices on top of each other. One alone is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _aligned(stored: np.ndarray) -> np.ndarray:
    """Return weights as float32, their inputs filled up with zeros to whole runs."""
    weight, missing = to_float32(stored), -stored.shape[1] % RUN_INPUTS
    return np.pad(weight, ((0, 0), (0, missing))) if missing else weight


class _Weights:
    """Reads tensors, a layer's attention or one MLP at a time, and hands them to the library, which copies them."""

    def __init__(self, target: NativeWeights, config: ModelConfig, reader: _MatrixReader) -> None:
        self._target = target
        self._config = config
        self._reader = reader
        self._alive: list[np.ndarray] = []

    def set_all(self) -> None:
        for index in range(self._config.layers):
            self._target.set_layer(index, self._layer(index))
            self._alive.clear()
            self._add_mlps(index)
        embedding = self._matrix(["model.embed_tokens"], biased=False)
        tied = self._config.tied_embeddings
        head = embedding if tied else self._matrix(["lm_head"], biased=False)
        self._target.set_ends(self._vector("model.norm.weight"), head, None if tied else embedding)
        self._alive.clear()

    def _layer(self, index: int) -> NativeLayer:
        config, prefix = self._config, f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        return NativeLayer(
            input_norm=self._vector(f"{prefix}input_layernorm.weight"),
            mlp_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            q_norm=self._vector(f"{attention}q_norm.weight") if config.qk_norm else None,
            k_norm=self._vector(f"{attention}k_norm.weight") if config.qk_norm else None,
            qkv=self._matrix([f"{attention}{part}_proj" for part in "qkv"], biased=config.qkv_bias),
            o=self._matrix([f"{attention}o_proj"], biased=config.o_bias),
            window=config.windows[index] or 0,
        )

    def _add_mlps(self, index: int) -> None:
        experts, prefix = self._config.experts, f"model.layers.{index}."
        if experts is not None and index in experts.layers:
            self._add_experts(index, experts, expert_names(self._config.architecture))
        else:
            parts = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up", "down")]
            self._add_mlp(index, *parts, biased=self._config.mlp_bias)

    def _add_experts(self, index: int, experts: Experts, names: ExpertNames) -> None:
        prefix = f"model.layers.{index}."
        scores = [names.router, *([names.shared_gate] if experts.shared_gate else [])]
        rows = self._hold(np.concatenate([self._reader.exact(f"{prefix}{name}.weight") for name in scores]))
        matrix = NativeMatrix(data=rows.ctypes.data, rows=len(rows), inputs=rows.shape[1])
        self._target.set_router(index, NativeRouter(matrix, experts.count, experts.used, experts.normalized))
        for expert in range(experts.count):
            self._add_mlp(index, *(prefix + part for part in names.expert(expert)))
        if experts.shared_intermediate:
            shared = f"{prefix}{names.shared}."
            self._add_mlp(index, f"{shared}gate_proj", f"{shared}up_proj", f"{shared}down_proj")

    def _add_mlp(self, index: int, gate: str, up: str, down: str, *, biased: bool = False) -> None:
        mlp = NativeMlp(self._matrix([gate, up], biased=biased), self._matrix([down], biased=biased))
        self._target.add_mlp(index, mlp)
        self._alive.clear()

    def _matrix(self, names: list[str], *, biased: bool) -> NativeMatrix:
        found = self._reader.matrix(names)
        bias = self._hold(np.concatenate([self._reader.exact(f"{name}.bias") for name in names])) if biased else None
        quantized = found if isinstance(found, QuantizedMatrix) else None
        weight = self._hold(found.codes if isinstance(found, QuantizedMatrix) else found)
        minimums = None if quantized is None else quantized.minimums
        return NativeMatrix(
            data=weight.ctypes.data,
            bias=None if bias is None else bias.ctypes.data,
            rows=len(weight),
            inputs=weight.shape[1],
            number=WEIGHT_NUMBERS["dense" if quantized is None else quantized.kind],
            scales=None if quantized is None else self._hold(quantized.scales).ctypes.data,
            minimums=None if minimums is None else self._hold(minimums).ctypes.data,
        )

    def _vector(self, name: str) -> int:
        return self._hold(self._reader.exact(name)).ctypes.data

    def _hold(self, array: np.ndarray) -> np.ndarray:
        """Keep an array until the library has copied it."""
        kept = np.ascontiguousarray(array)
        self._alive.append(kept)
        return kept
