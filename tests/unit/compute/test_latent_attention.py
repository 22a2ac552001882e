"""Latent attention: the absorbed and the expanded form equal the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.compute.models.model_config import Latent
from baton.compute.torch.kernels import latent as latent_kernel
from baton.compute.torch.kernels.attention_backend import visible
from baton.compute.torch.kernels.latent import LatentPlan, UpProjection, expansion_is_cheaper, plan_latent
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.decide.kv.layout import KVLayout

HEADS, LAYERS, BLOCK_TOKENS = 3, 2, 16
LATENT = Latent(q_rank=None, kv_rank=24, rope_dim=8, nope_dim=12, value_dim=10, score_scale=0.31, rope_pairs=True)
WIDTH = LATENT.kv_rank + LATENT.rope_dim
DEEPSEEK = Latent(
    q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, score_scale=192**-0.5, rope_pairs=True
)
CASES = {
    "decodes": [(1, 0), (1, 15), (1, 16), (1, 150)],
    "one_chunk": [(20, 0)],
    "chunk_after_a_prefix": [(20, 45)],
    "mixed": [(1, 40), (33, 0), (1, 7), (5, 60), (2, 15), (2, 0)],
}


def _batch(sizes: list[tuple[int, int]]) -> tuple[list[Row], PagedKV]:
    """Make a batch. sizes: (new tokens, tokens before) of each request. Unwritten slots are NaN."""
    layout = KVLayout(layers=LAYERS, kv_heads=1, head_dim=WIDTH, block_tokens=BLOCK_TOKENS, dtype="float32", planes=1)
    counts = [-(-(count + start) // BLOCK_TOKENS) for count, start in sizes]
    kv = PagedKV(torch.full((layout.block_bytes * (sum(counts) + 3),), 255, dtype=torch.uint8), layout)
    ids = torch.randperm(sum(counts) + 3)[: sum(counts)].split(counts)
    rows: list[Row] = []
    for (count, start), blocks in zip(sizes, ids, strict=True):
        first = rows[-1].first + rows[-1].count if rows else 0
        rows.append(Row(first=first, count=count, start=start, blocks=blocks))
    everything = [Row(first=0, count=row.total, start=0, blocks=row.blocks) for row in rows]
    for layer in range(LAYERS):
        kv.write_latents(layer, kv.slots(everything), torch.randn(sum(row.total for row in rows), WIDTH))
    return rows, kv


def _formula(rows: list[Row], kv: PagedKV, layer: int, nope: Tensor, rope: Tensor, up: UpProjection) -> Tensor:
    out = torch.empty(len(nope), HEADS, LATENT.value_dim, dtype=torch.float64)
    for row in rows:
        cached = kv.data[row.blocks, layer, 0, :, 0].flatten(0, 1)[: row.total].double()  # [total, width]
        compressed, positioned = cached.split((LATENT.kv_rank, LATENT.rope_dim), -1)
        tokens = slice(row.first, row.first + row.count)
        for head in range(HEADS):
            keys = torch.cat((compressed @ up.keys[head].double().T, positioned), -1)
            queries = torch.cat((nope[tokens, head], rope[tokens, head]), -1).double()
            hidden = ~visible(range(row.start, row.total), range(row.total), None)
            weights = (queries @ keys.T * LATENT.score_scale).masked_fill(hidden, float("-inf")).softmax(-1)
            out[tokens, head] = weights @ compressed @ up.values[head].double()
    return out.flatten(1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["absorbed", "absorbed_reference", "expanded", "expanded_reference", "chosen"])
def test_every_form_equals_the_formula(case: str, form: str) -> None:
    torch.manual_seed(5)
    rows, kv = _batch(CASES[case])
    tokens = sum(row.count for row in rows)
    nope, rope = torch.randn(tokens, HEADS, LATENT.nope_dim), torch.randn(tokens, HEADS, LATENT.rope_dim)
    up = UpProjection(torch.randn(HEADS, LATENT.nope_dim, LATENT.kv_rank), torch.randn(HEADS, LATENT.kv_rank, 10))
    plan = _plan(form, rows, kv)
    for layer in range(LAYERS):
        expected = _formula(rows, kv, layer, nope, rope, up)
        torch.testing.assert_close(plan.run(layer, nope, rope, up).double(), expected, atol=2e-4, rtol=1e-4)


def test_tiles_and_few_heads_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, so that a short test reaches them."""
    monkeypatch.setattr(latent_kernel, "EXPANDED_BYTES", 1)
    test_every_form_equals_the_formula("mixed", "expanded")


def test_long_chunks_are_expanded_and_short_ones_absorbed() -> None:
    """With DeepSeek's sizes: a decode never, a first chunk always, a later one from about 170 tokens on."""
    blocks = torch.empty(0)
    rows = [Row(first=0, count=count, start=8000, blocks=blocks) for count in (1, 64, 200, 512)]
    forms = {row.count: expansion_is_cheaper(row, DEEPSEEK) for row in rows}
    assert forms == {1: False, 64: False, 200: True, 512: True}
    assert expansion_is_cheaper(Row(first=0, count=2, start=0, blocks=blocks), DEEPSEEK)


def _plan(form: str, rows: list[Row], kv: PagedKV) -> LatentPlan:
    everything = torch.arange(sum(row.count for row in rows))
    match form:
        case "absorbed":
            return LatentPlan(LATENT, kv, SdpaBackend().plan(rows, kv), everything, ())
        case "absorbed_reference":
            return LatentPlan(LATENT, kv, ReferenceBackend().plan(rows, kv), everything, ())
        case "expanded_reference":
            return LatentPlan(LATENT, kv, None, everything, rows, ReferenceBackend())
        case "expanded":
            return LatentPlan(LATENT, kv, None, everything, rows, SdpaBackend())
        case _:
            return plan_latent(rows, kv, SdpaBackend(), LATENT)
