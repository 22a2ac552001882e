"""Multi-head latent attention over paged latents, in two forms with equal results and different cost.

Absorbed: queries are projected into the latent space, and all heads read one vector per token as key and value. This
reads the least memory, so decoding uses it. Expanded: keys and values of every head are projected from the latents
first. This takes fewer operations per pair of query and key, so long chunks use it.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 and appendix C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from baton.compute.models.model_config import Latent
from baton.compute.torch.kernels.attention_backend import AttentionBackend, AttentionPlan
from baton.compute.torch.kernels.paged_kv import TORCH_DTYPES, PagedKV, Row
from baton.compute.torch.layers.collectives import Collectives, SingleRank
from baton.decide.kv.layout import KVLayout

ALONE = SingleRank()
EXPANDED_BYTES = 64 << 20
"""The maximum size of the expanded keys and values of the heads that are computed together."""


@dataclass(frozen=True, slots=True)
class UpProjection:
    """One layer's projection from the latent space to keys and values."""

    keys: Tensor  # [heads, nope_dim, kv_rank]
    values: Tensor  # [heads, kv_rank, value_dim]


def expansion_is_cheaper(row: Row, latent: Latent) -> bool:
    """Return whether the expanded form takes fewer operations than the absorbed form. Never for a single token.

    Expansion saves operations per pair of query and key, and costs a projection per cached key.
    """
    if row.count == 1:
        return False
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
    backend: AttentionBackend | None = None
    """Computes the chunks over their expanded keys and values. None: there are no chunks."""
    collectives: Collectives = ALONE
    """Gathers the latents of chunks from the ranks that share their tokens."""
    _scratch: dict[tuple[int, int], _Expanded] = field(default_factory=dict[tuple[int, int], "_Expanded"])
    """Memory and plans of expanded slices, by (first row of the slice in the step, number of heads)."""

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
            queries = torch.cat((nope[tokens], rope[tokens]), -1)  # [count, heads, nope_dim + rope_dim]
            out[tokens] = self._expanded(row, layer, queries, up)
        return out.flatten(1)

    def _absorbed(self, plan: AttentionPlan, layer: int, nope: Tensor, rope: Tensor, up: UpProjection) -> Tensor:
        width = self.latent.kv_rank + self.latent.rope_dim
        projected = torch.bmm(nope.transpose(0, 1), up.keys).transpose(0, 1)  # [tokens, heads, kv_rank]
        # The plan scales scores by width ** -0.5, so the queries are scaled to give `score_scale` in total.
        queries = torch.cat((projected, rope), -1) * (self.latent.score_scale * width**0.5)
        read = plan.run(layer, queries, None).view(queries.shape)[..., : self.latent.kv_rank]
        return torch.bmm(read.transpose(0, 1), up.values).transpose(0, 1)

    def _expanded(self, row: Row, layer: int, queries: Tensor, up: UpProjection) -> Tensor:
        """Return [count, heads, value_dim] of one slice. queries: [count, heads, nope_dim + rope_dim].

        Every rank expands the latents of all tokens, for its own heads.
        """
        kv, latent = self.kv, self.latent
        nope, width = latent.nope_dim, latent.nope_dim + latent.rope_dim
        scratch = kv.data.new_empty(len(row.blocks) * kv.layout.block_tokens * kv.cell)
        own = kv.gather(kv.planes(row.blocks) + layer, scratch).view(len(row.blocks), -1, kv.cell)
        cached = self.collectives.gather_context(own).transpose(0, 1).reshape(-1, kv.cell)
        compressed, positioned = kv.numbers(cached, queries.dtype).split((latent.kv_rank, latent.rope_dim), -1)
        head_dim = max(width, latent.value_dim)
        # Plans scale scores by head_dim ** -0.5, so the queries are scaled to give `score_scale` in total.
        padded = functional.pad(queries * (latent.score_scale * head_dim**0.5), (0, head_dim - width))
        head_bytes = 2 * len(cached) * head_dim * queries.element_size()
        step = max(1, EXPANDED_BYTES // head_bytes)
        parts: list[Tensor] = []
        for first in range(0, queries.shape[1], step):
            heads = slice(first, first + step)
            expanded = self._expanded_kv(row, padded[:, heads])
            keys, values = (expanded.kv.data[:, 0, plane] for plane in (0, 1))  # [blocks, block_tokens, heads, dim]
            rows = keys.shape[:3]
            keys[..., :nope] = torch.matmul(compressed, up.keys[heads].transpose(1, 2)).transpose(0, 1).view(*rows, -1)
            keys[..., nope:width] = positioned.view(*rows[:2], 1, -1)
            values[..., : latent.value_dim] = torch.matmul(compressed, up.values[heads]).transpose(0, 1).view(*rows, -1)
            found = expanded.plan.run(0, padded[:, heads], None).view(row.count, rows[2], -1)
            parts.append(found[..., : latent.value_dim])
        return torch.cat(parts, 1)

    def _expanded_kv(self, row: Row, queries: Tensor) -> _Expanded:
        """Return memory for the expanded keys and values of some heads, and its plan. Layers share both."""
        _, heads, head_dim = queries.shape
        key = row.first, heads
        if key not in self._scratch:
            assert self.backend is not None, "a plan with chunks has their backend"
            layout = KVLayout(
                layers=1, kv_heads=heads, head_dim=head_dim, block_tokens=self.kv.part.block_tokens,
                dtype=next(name for name, dtype in TORCH_DTYPES.items() if dtype == queries.dtype),
            )  # fmt: skip
            memory = torch.zeros(len(row.blocks) * layout.block_bytes, dtype=torch.uint8, device=queries.device)
            kv = PagedKV(memory, layout)
            alone = Row(0, row.count, row.start, torch.arange(len(row.blocks)))
            self._scratch[key] = _Expanded(kv, self.backend.plan([alone], kv))
        return self._scratch[key]


@dataclass(frozen=True, slots=True)
class _Expanded:
    """Keys and values of some heads of one slice, and the plan of its attention."""

    kv: PagedKV
    plan: AttentionPlan


def plan_latent(
    rows: Sequence[Row], kv: PagedKV, backend: AttentionBackend, latent: Latent, collectives: Collectives = ALONE
) -> LatentPlan:
    """Return the plan of a step, in which every slice uses its cheaper form: absorbed or expanded."""
    chunks: list[Row] = []
    short: list[Row] = []
    picked: list[Tensor] = []
    first = 0
    for row in rows:
        if expansion_is_cheaper(row, latent):
            chunks.append(row)
        else:
            short.append(replace(row, first=first))
            picked.append(torch.arange(row.first, row.first + row.count))
            first += row.count
    return LatentPlan(
        latent=latent,
        kv=kv,
        short=backend.plan(short, kv) if short else None,
        short_tokens=torch.cat(picked).to(kv.data.device) if picked else torch.empty(0, dtype=torch.int64),
        chunks=chunks,
        backend=backend,
        collectives=collectives,
    )
