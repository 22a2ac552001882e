"""Load the native engine: which models it serves, and their weights into its panels."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from baton.engine.card import ModelCard
from baton.engine.dtype import Dtype
from baton.engine.kernels.paged import TORCH_DTYPES
from baton.engine.model_config import ModelConfig
from baton.engine.native.library import NUMBERS, NativeLayer, NativeLibrary, NativeMatrix, NativeModel
from baton.engine.native_engine import NativeEngine
from baton.engine.resolve import read_config
from baton.engine.weights import WeightReader, open_weights
from baton.kv.layout import KVLayout

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
HEAD_DIM_MAX = 256


def native_refusal(card: ModelCard, layout: KVLayout, device: str) -> str:
    """Say why the native engine does not serve this model with this layout; empty where it does."""
    if device != "cpu":
        return f"the native engine computes on the CPU, and the device is {device}"
    if card.architecture not in ARCHITECTURES:
        return f"the native engine serves {', '.join(ARCHITECTURES)}, and not {card.architecture}"
    if layout != card.layout(block_tokens=layout.block_tokens, dtype=layout.dtype):
        return "the arena's layout is not that of the model"
    if layout.dtype not in NUMBERS:
        return f"the native engine stores KV as {' or '.join(NUMBERS)}, and not as {layout.dtype}"
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
    """See `load_engine`."""
    torch.set_num_threads(threads)
    config = read_config(card)
    model = NativeModel(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        vocab=config.vocab_tokens,
        rms_eps=config.rms_eps,
        number=NUMBERS[dtype],
        kv_number=NUMBERS[layout.dtype],
        block_tokens=layout.block_tokens,
        threads=threads,
        kernels=library.kernels.encode(),
        cores=_cores(threads),
    )
    engine = NativeEngine(library, library.new(model), config, layout, memory)
    with torch.inference_mode():
        _Weights(library, engine.handle, config, open_weights(card, config), TORCH_DTYPES[dtype]).set_all()
    return engine


def _cores(threads: int) -> ctypes.Array[ctypes.c_int32] | None:
    """Name a core for each thread where this process owns exactly as many; else the system places them."""
    mine = sorted(os.sched_getaffinity(0))
    return (ctypes.c_int32 * threads)(*mine) if len(mine) == threads > 1 else None


class _Weights:
    """Reads tensors one layer at a time and hands them to the library, which copies them."""

    def __init__(
        self, library: NativeLibrary, handle: int, config: ModelConfig, reader: WeightReader, dtype: torch.dtype
    ) -> None:
        self._library = library
        self._handle = handle
        self._config = config
        self._reader = reader
        self._dtype = dtype
        self._alive: list[Tensor] = []

    def set_all(self) -> None:
        for index in range(self._config.layers):
            self._library.set_layer(self._handle, index, self._layer(index))
            self._alive.clear()
        embedding = self._matrix(["model.embed_tokens"], biased=False)
        tied = self._config.tied_embeddings
        head = embedding if tied else self._matrix(["lm_head"], biased=False)
        self._library.set_ends(self._handle, self._vector("model.norm.weight"), head, None if tied else embedding)
        self._alive.clear()

    def _layer(self, index: int) -> NativeLayer:
        config, prefix = self._config, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return NativeLayer(
            input_norm=self._vector(f"{prefix}input_layernorm.weight"),
            mlp_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            q_norm=self._vector(f"{attention}q_norm.weight") if config.qk_norm else None,
            k_norm=self._vector(f"{attention}k_norm.weight") if config.qk_norm else None,
            qkv=self._matrix([f"{attention}{part}_proj" for part in "qkv"], biased=config.qkv_bias),
            o=self._matrix([f"{attention}o_proj"], biased=config.o_bias),
            gate_up=self._matrix([f"{mlp}gate_proj", f"{mlp}up_proj"], biased=config.mlp_bias),
            down=self._matrix([f"{mlp}down_proj"], biased=config.mlp_bias),
            window=config.windows[index] or 0,
        )

    def _matrix(self, names: list[str], *, biased: bool) -> NativeMatrix:
        """Stack matrices that read the same input: [rows, inputs]."""
        parts = [self._reader.read(f"{name}.weight").to(self._dtype) for name in names]
        weight = self._hold(torch.cat(parts))
        bias = self._hold(torch.cat([self._reader.read(f"{name}.bias").float() for name in names])) if biased else None
        return NativeMatrix(
            data=weight.data_ptr(), bias=None if bias is None else bias.data_ptr(), rows=len(weight),
            inputs=weight.shape[1],
        )  # fmt: skip

    def _vector(self, name: str) -> int:
        return self._hold(self._reader.read(name).float()).data_ptr()

    def _hold(self, tensor: Tensor) -> Tensor:
        """Keep a tensor until the library has copied it."""
        kept = tensor.contiguous()
        self._alive.append(kept)
        return kept
