"""What a model is, as far as everybody but the forward pass needs to know. Read without torch and without weights."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.decide.kv.layout import KVDtype, KVLayout

ModelFormat = Literal["safetensors", "gguf", "hash"]


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model that can be served: where its files are, and its sizes."""

    name: str
    """What clients call it: `/v1/models` lists it."""
    path: str
    """Folder with safetensors, or a .gguf file. Empty for the hash engine."""
    format: ModelFormat
    architecture: str
    """One of `model_config.ARCHITECTURES`, or `hash`."""
    layers: int
    kv_heads: int
    head_dim: int
    kv_planes: Literal[1, 2] = 2
    """See `KVLayout.planes`."""
    vocab_tokens: int
    context_tokens: int
    """Most tokens, prompt and output together, that one request may have."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    window_tokens: int | None = None
    """How far back the widest of its layers sees, a token's own position included. None: some layer sees everything."""
    embedding_dim: int = 0
    """Values of the vector that it makes of a prompt. 0: it makes none."""
    weight_bytes: int = 0
    """Size of the weight files, for messages."""

    def layout(
        self, *, block_tokens: int, dtype: KVDtype, tensor_parallel: int = 1, pipeline_parallel: int = 1
    ) -> KVLayout:
        return KVLayout(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            dtype=dtype,
            planes=self.kv_planes,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
        )
