"""Read the weights of latent attention for the native library: rotary rows in order, up projections per head."""

from __future__ import annotations

import numpy as np

from baton.compute.models.model_config import Latent, ModelConfig
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.rope import rotary_order
from baton.compute.native.library import NativeLatent, NativeMatrix
from baton.compute.native.matrices import HeldArrays, MatrixReader


class LatentMatrices:
    """Reads the attention weights of a layer. `prefix` is always `model.layers.N.self_attn.`."""

    def __init__(self, config: ModelConfig, latent: Latent, reader: MatrixReader, held: HeldArrays) -> None:
        self._config = config
        self._latent = latent
        self._reader = reader
        self._held = held
        head_rows = latent.nope_dim + latent.rope_dim
        firsts = np.arange(config.heads)[:, None] * head_rows
        self._query_order = (firsts + rotary_order(head_rows, latent)).ravel()  # [heads * (nope_dim + rope_dim)]
        self._key_order = rotary_order(config.head_dim, latent)  # [kv_rank + rope_dim]

    def qkv(self, prefix: str) -> NativeMatrix:
        """Read the projections of the hidden state: to the query bottleneck (or all queries), then to the latent."""
        narrow = self._latent.q_rank
        first = f"{prefix}{'q_proj' if narrow is None else 'q_a_proj'}"
        order = self._query_order if narrow is None else np.arange(narrow)
        order = np.concatenate((order, len(order) + self._key_order))
        found = self._reader.matrix([first, f"{prefix}kv_a_proj_with_mqa"])
        return self._held.matrix(_in_order(found, order), self._bias(prefix, order))

    def _bias(self, prefix: str, order: np.ndarray) -> np.ndarray | None:
        """Return the bias of `qkv`. It is zero for rows of queries that have no bottleneck."""
        if not self._config.qkv_bias:
            return None
        latent = self._reader.float32(f"{prefix}kv_a_proj_with_mqa.bias")
        if self._latent.q_rank is not None:
            first = self._reader.float32(f"{prefix}q_a_proj.bias")
        else:
            first = np.zeros(len(order) - len(latent), dtype=np.float32)
        return np.concatenate((first, latent))[order]

    def norms_and_up_projections(self, prefix: str) -> NativeLatent:
        """Read what `qkv` leaves out. Up projections are dense, because a transposed matrix cannot keep its codes."""
        latent, held, narrow = self._latent, self._held, self._latent.q_rank is not None
        up = self._reader.dense(f"{prefix}kv_b_proj.weight")
        up = up.reshape(self._config.heads, -1, latent.kv_rank)  # [heads, nope_dim + value_dim, kv_rank]
        keys, values = up[:, : latent.nope_dim].swapaxes(1, 2), up[:, latent.nope_dim :]
        found = NativeLatent(
            q_norm=held.address(self._reader.float32(f"{prefix}q_a_layernorm.weight")) if narrow else None,
            kv_norm=held.address(self._reader.float32(f"{prefix}kv_a_layernorm.weight")),
            keys=held.matrix(keys.reshape(-1, latent.nope_dim)),
            values=held.matrix(values.reshape(-1, latent.kv_rank)),
        )
        if narrow:
            queries = self._reader.matrix([f"{prefix}q_b_proj"])
            found.queries = held.matrix(_in_order(queries, self._query_order))
        return found


def _in_order(found: np.ndarray | QuantizedMatrix, order: np.ndarray) -> np.ndarray | QuantizedMatrix:
    return found.rows_in_order(order) if isinstance(found, QuantizedMatrix) else found[order]
