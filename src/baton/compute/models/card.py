"""The facts about a model that the server, the pool and the workers need. Reading them loads no torch, no weights."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.decide.kv.layout import KVDtype, KVLayout

ModelFormat = Literal["safetensors", "gguf", "hash", "dummy"]


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model that can be served: the path of its files, and its sizes."""

    name: str
    """The name that clients use; `/v1/models` lists it."""
    path: str
    """A folder with safetensors files (`dummy`: with config.json), or a .gguf file. Of a hash model: its seed."""
    format: ModelFormat
    architecture: str
    """One of `model_config.ARCHITECTURES`, or `hash`."""
    layers: int
    kv_heads: int
    head_dim: int
    kv_planes: Literal[1, 2] = 2
    """Planes of the KV cache: 2 for keys and values, 1 for latent vectors. See `KVLayout.planes`."""
    vocab_tokens: int
    context_tokens: int
    """The maximum number of tokens of one request, prompt and output together."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    window_tokens: int | None = None
    """The widest attention window of all layers, a token's own position included. None: a layer has no window."""
    embedding_dim: int = 0
    """The dimension of a prompt's embedding. 0: the model has no embeddings."""
    adapter: str = ""
    """The folder of a LoRA adapter that is added to the weights. Empty: none."""
    weight_bytes: int = 0
    """The size of the weight files."""

    def layout(
        self,
        *,
        block_tokens: int,
        dtype: KVDtype,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        context_parallel: int = 1,
        data_parallel: int = 1,
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
            context_parallel=context_parallel,
            data_parallel=data_parallel,
        )
