"""Multi-head latent attention over paged latents, in two forms with equal results and different cost.

Absorbed: queries are projected into the latent space, and all heads read one vector per token as key and value. This
reads the least memory, so decoding uses it. Expanded: keys and values of every head are projected from the latents
first. This takes fewer operations per pair of query and key, so long chunks use it.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 and appendix C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from baton.compute.models.model_config import Latent
from baton.compute.torch.kernels.attention_backend import AttentionBackend, AttentionPlan, visible
from baton.compute.torch.kernels.paged_kv import PagedKV, Row

TILE_QUERIES = 512
"""Queries per mask. Chunks are masked in tiles of this size, so that a mask stays small."""
EXPANDED_BYTES = 64 << 20
"""The maximum size of the expanded keys and values of the heads that are computed together."""


@dataclass(frozen=True, slots=True)
class UpProjection:
    """One layer's projection from the latent space to keys and values."""

    keys: Tensor  # [heads, nope_dim, kv_rank]
    values: Tensor  # [heads, kv_rank, value_dim]


def expansion_is_cheaper(row: Row, latent: Latent) -> bool:
    """Return whether the expanded form takes fewer operations than the absorbed form.

    Expansion saves operations per pair of query and key, and costs a projection per cached key.
    """
    absorbed_pair = (latent.kv_rank + latent.rope_dim) + latent.kv_rank
    expanded_pair = (latent.nope_dim + latent.rope_dim) + latent.value_dim
    projection = latent.kv_rank * (latent.nope_dim + latent.value_dim)  # per key if expanded, per query if absorbed
    return row.count * row.total * (absorbed_pair - expanded_pair) > (row.total - row.count) * projection


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The latent attention of one step. Each slice uses the cheaper of two algorithms: absorbed or expanded.

    Absorbed: the queries are projected into the space of the latents. Expanded: the latents are projected to keys and
    values.
    """

    latent: Latent
    kv: PagedKV
    short: AttentionPlan | None
    """Absorbed attention of the tokens in `short_tokens`. None: no slice uses it."""
    short_tokens: Tensor  # [tokens of short] rows of the step
    chunks: Sequence[Row]
    """Slices in the expanded form."""

    def run(self, layer: int, nope: Tensor, rope: Tensor, up: UpProjection) -> Tensor:
        """Return the attention of queries to a layer's latents: [tokens, heads * value_dim], in the queries' type.

        nope: queries without positions [tokens, heads, nope_dim]. rope: rotated queries [tokens, heads, rope_dim].
        The latents of this step are already written.
        """
        out = nope.new_empty(*nope.shape[:2], self.latent.value_dim)
        if self.short is not None:
            picked = self.short_tokens
            out[picked] = self._absorbed(self.short, layer, nope[picked], rope[picked], up)
        for row in self.chunks:
            tokens = slice(row.first, row.first + row.count)
            queries = torch.cat((nope[tokens], rope[tokens]), -1).transpose(0, 1)  # [heads, count, nope + rope]
            out[tokens] = self._expanded(row, layer, queries, up).transpose(0, 1)
        return out.flatten(1)

    def _absorbed(self, plan: AttentionPlan, layer: int, nope: Tensor, rope: Tensor, up: UpProjection) -> Tensor:
        width = self.latent.kv_rank + self.latent.rope_dim
        projected = torch.bmm(nope.transpose(0, 1), up.keys).transpose(0, 1)  # [tokens, heads, kv_rank]
        # The plan scales scores by width ** -0.5, so the queries are scaled to give `score_scale` in total.
        queries = torch.cat((projected, rope), -1) * (self.latent.score_scale * width**0.5)
        read = plan.run(layer, queries, None).view(queries.shape)[..., : self.latent.kv_rank]
        return torch.bmm(read.transpose(0, 1), up.values).transpose(0, 1)

    def _expanded(self, row: Row, layer: int, queries: Tensor, up: UpProjection) -> Tensor:
        """Return [heads, count, value_dim] of one slice. queries: [heads, count, nope_dim + rope_dim]."""
        kv, latent = self.kv, self.latent
        scratch = kv.data.new_empty(len(row.blocks) * kv.layout.block_tokens * kv.layout.head_dim)
        cached = kv.gather(kv.planes(row.blocks) + layer, scratch).view(-1, kv.layout.head_dim)[: row.total]
        compressed, positioned = cached.to(queries.dtype).split((latent.kv_rank, latent.rope_dim), -1)
        head_bytes = row.total * (2 * latent.nope_dim + 2 * latent.rope_dim) * queries.element_size()
        step = max(1, EXPANDED_BYTES // head_bytes)
        parts: list[Tensor] = []
        for first in range(0, len(queries), step):
            heads = slice(first, first + step)
            keys = torch.matmul(compressed, up.keys[heads].transpose(1, 2))  # [heads, total, nope_dim]
            keys = torch.cat((keys, positioned.expand(len(keys), -1, -1)), -1)
            values = torch.matmul(compressed, up.values[heads])  # [heads, total, value_dim]
            parts.append(self._causal(row, queries[heads], keys, values))
        return torch.cat(parts)

    def _causal(self, row: Row, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return causal attention in tiles of queries.

        The fused kernel needs values as wide as keys, so values are padded, and the result is sliced.
        """
        width = max(0, keys.shape[-1] - values.shape[-1])
        padded = functional.pad(values, (0, width))
        tiles: list[Tensor] = []
        for offset in range(0, row.count, TILE_QUERIES):
            end = min(offset + TILE_QUERIES, row.count)
            start, total = row.start + offset, row.start + end
            seen = None if start == 0 else visible(range(start, total), range(total), None, queries.device)
            tile = functional.scaled_dot_product_attention(
                queries[None, :, offset:end],
                keys[None, :, :total],
                padded[None, :, :total],
                attn_mask=seen,
                is_causal=seen is None,
                scale=self.latent.score_scale,
            )
            tiles.append(tile[0, ..., : values.shape[-1]])
        return torch.cat(tiles, 1)


def plan_latent(rows: Sequence[Row], kv: PagedKV, backend: AttentionBackend, latent: Latent) -> LatentPlan:
    """Return the plan of a step, in which every slice uses its cheaper form: absorbed or expanded."""
    short: list[Row] = []
    picked: list[Tensor] = []
    first = 0
    for row in rows:
        if not expansion_is_cheaper(row, latent):
            short.append(replace(row, first=first))
            picked.append(torch.arange(row.first, row.first + row.count))
            first += row.count
    return LatentPlan(
        latent=latent,
        kv=kv,
        short=backend.plan(short, kv) if short else None,
        short_tokens=torch.cat(picked).to(kv.data.device) if picked else torch.empty(0, dtype=torch.int64),
        chunks=[row for row in rows if expansion_is_cheaper(row, latent)],
    )
