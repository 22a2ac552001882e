"""Latent attention's weights as the native library takes them: rotary rows in order, and each head's way both ways."""

from __future__ import annotations

import numpy as np

from baton.compute.models.model_config import Latent, ModelConfig
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.rope import rotary_order
from baton.compute.native.library import NativeLatent, NativeMatrix
from baton.compute.native.matrices import Held, MatrixReader


class LatentMatrices:
    """Reads what attention needs of a layer. The prefix is always `model.layers.N.self_attn.`."""

    def __init__(self, config: ModelConfig, latent: Latent, reader: MatrixReader, held: Held) -> None:
        self._config = config
        self._latent = latent
        self._reader = reader
        self._held = held
        head_rows = latent.nope_dim + latent.rope_dim
        firsts = np.arange(config.heads)[:, None] * head_rows
        self._query_order = (firsts + rotary_order(head_rows, latent)).ravel()  # [heads * (nope_dim + rope_dim)]
        self._key_order = rotary_order(config.head_dim, latent)  # [kv_rank + rope_dim]

    def qkv(self, prefix: str) -> NativeMatrix:
        """Read what takes the hidden state: the narrow query (or all queries), and below it the latent."""
        narrow = self._latent.q_rank
        first = f"{prefix}{'q_proj' if narrow is None else 'q_a_proj'}"
        order = self._query_order if narrow is None else np.arange(narrow)
        order = np.concatenate((order, len(order) + self._key_order))
        found = self._reader.matrix([first, f"{prefix}kv_a_proj_with_mqa"])
        return self._held.matrix(_in_order(found, order), self._bias(prefix, order))

    def _bias(self, prefix: str, order: np.ndarray) -> np.ndarray | None:
        """Return that of `qkv`. Queries without a bottleneck have none."""
        if not self._config.qkv_bias:
            return None
        latent = self._reader.exact(f"{prefix}kv_a_proj_with_mqa.bias")
        if self._latent.q_rank is not None:
            first = self._reader.exact(f"{prefix}q_a_proj.bias")
        else:
            first = np.zeros(len(order) - len(latent), dtype=np.float32)
        return np.concatenate((first, latent))[order]

    def beside(self, prefix: str) -> NativeLatent:
        """Read the rest. The ways from heads to latents and back are dense: codes of one share scales across it."""
        latent, held, narrow = self._latent, self._held, self._latent.q_rank is not None
        up = self._reader.dense(f"{prefix}kv_b_proj.weight")
        up = up.reshape(self._config.heads, -1, latent.kv_rank)  # [heads, nope_dim + value_dim, kv_rank]
        keys, values = up[:, : latent.nope_dim].swapaxes(1, 2), up[:, latent.nope_dim :]
        found = NativeLatent(
            q_norm=held.address(self._reader.exact(f"{prefix}q_a_layernorm.weight")) if narrow else None,
            kv_norm=held.address(self._reader.exact(f"{prefix}kv_a_layernorm.weight")),
            keys=held.matrix(keys.reshape(-1, latent.nope_dim)),
            values=held.matrix(values.reshape(-1, latent.kv_rank)),
        )
        if narrow:
            queries = self._reader.matrix([f"{prefix}q_b_proj"])
            found.queries = held.matrix(_in_order(queries, self._query_order))
        return found


def _in_order(found: np.ndarray | QuantizedMatrix, order: np.ndarray) -> np.ndarray | QuantizedMatrix:
    return found.rows_in_order(order) if isinstance(found, QuantizedMatrix) else found[order]
