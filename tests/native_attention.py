"""The native engine's attention as an attention backend: through models whose only computation it is.

A token's embedding holds its queries, and its keys and values in the arena. Projections select parts of it, rotations
are by the angle 0, and the output projection of one layer writes the attention into dimensions that were 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLayer, NativeLibrary, NativeMatrix, NativeMlp, NativeModel, NativeStep
from baton.compute.torch.kernels.paged_kv import PagedKV, Row

Floats = np.ndarray


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """Implements `AttentionBackend` with one instruction set of the native engine. KV is float32."""

    kernels: str

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> NativePlan:
        return NativePlan(NativeLibrary(library_path(), self.kernels), rows, kv)


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Implements `AttentionPlan`. Each call computes a step of a model of its own, over a copy of the arena."""

    library: NativeLibrary
    rows: Sequence[Row]
    kv: PagedKV

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        inputs = np.concatenate((queries.flatten(1).numpy(), self._new_kv(layer)), 1)  # [tokens, width of q, k and v]
        tokens, width = inputs.shape
        attended = queries[0].numel()
        rest = (inputs.astype(np.float64) ** 2).sum(1)
        filler = np.sqrt(rest.max() * 1.01 - rest).astype(np.float32)  # so that every token has the same norm
        embedding = np.concatenate((inputs, np.zeros((tokens, attended), np.float32), filler[:, None]), 1)
        hidden = self._compute(layer, embedding, queries.shape[1], window or 0)
        scale = filler / hidden[:, -1]  # the final norm divides each row by a number
        return torch.from_numpy(hidden[:, width : width + attended] * scale[:, None])

    def _new_kv(self, layer: int) -> Floats:
        """Return the keys and values of the step's tokens from the arena: [tokens, 2 * kv_heads * head_dim]."""
        block_tokens = self.kv.layout.block_tokens
        parts: list[Tensor] = []
        for row in self.rows:
            positions = torch.arange(row.start, row.total)
            blocks = row.blocks[positions // block_tokens]
            parts.append(self.kv.data[blocks, layer, :, positions % block_tokens].flatten(1))
        return torch.cat(parts).numpy()

    def _compute(self, layer: int, embedding: Floats, heads: int, window: int) -> Floats:
        """Return the hidden states of the step after the final norm: [tokens, hidden]."""
        layout, library = self.kv.layout, self.library
        tokens, hidden = embedding.shape
        kv_width, attended = 2 * layout.kv_heads * layout.head_dim, heads * layout.head_dim
        model = NativeModel(
            layers=layout.layers,
            hidden=hidden,
            heads=heads,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            vocab=tokens,
            rms_eps=1e-12,
            block_tokens=layout.block_tokens,
            threads=1,
            kernels=library.kernels.encode(),
        )
        norm = np.full(hidden, np.sqrt((embedding[0].astype(np.float64) ** 2).mean()), np.float32)
        select = np.eye(attended + kv_width, hidden, dtype=np.float32)
        write = np.eye(hidden, attended, -(attended + kv_width), dtype=np.float32)
        nothing, narrow, wide = (
            np.zeros_like(write),
            np.zeros((2, hidden), np.float32),
            np.zeros((hidden, 1), np.float32),
        )
        arena = self.kv.data.clone()
        handle = library.new(model)
        try:
            target = library.weights(handle)
            for index in range(layout.layers):
                output = write if index == layer else nothing
                matrices = NativeLayer(qkv=_matrix(select), o=_matrix(output), window=window)
                matrices.input_norm, matrices.mlp_norm = norm.ctypes.data, norm.ctypes.data
                target.set_layer(index, matrices)
                target.add_mlp(index, NativeMlp(_matrix(narrow), _matrix(wide)))
            target.finish_weights(norm.ctypes.data, _matrix(embedding), None)
            library.set_arena(handle, arena.data_ptr(), len(arena))
            self._forward(handle, tokens)
            found, rows = np.empty_like(embedding), np.arange(tokens, dtype=np.int32)
            library.read(handle, rows.ctypes.data, tokens, found.ctypes.data)
        finally:
            library.free(handle)
        return found

    def _forward(self, handle: int, tokens: int) -> None:
        """Compute the step. Token i of the step has the embedding i."""
        numbers = [[row.count for row in self.rows], [row.start for row in self.rows]]
        counts, starts, sizes = (
            np.array(each, np.int32) for each in (*numbers, [len(row.blocks) for row in self.rows])
        )
        blocks = torch.cat([row.blocks for row in self.rows]).to(torch.int32).numpy()
        ids, done, half = np.arange(tokens, dtype=np.int32), np.zeros(1, np.int32), self.kv.layout.head_dim // 2
        positions = max(row.total for row in self.rows)
        angles = np.concatenate((np.ones((positions, half), np.float32), np.zeros((positions, half), np.float32)), 1)
        arrays = (ids, counts, starts, blocks, sizes, angles, done)
        lengths = (len(self.rows), tokens, len(blocks), positions)
        self.library.forward(handle, NativeStep(*lengths, *(array.ctypes.data for array in arrays)))


def _matrix(values: Floats) -> NativeMatrix:
    """Return the structure of a float32 matrix, which the caller keeps alive until the library has copied it."""
    return NativeMatrix(data=values.ctypes.data, rows=len(values), inputs=values.shape[1])
