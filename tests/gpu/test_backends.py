"""The attention backends without kernels of ours, on a GPU. `make gpu ARGS=--rehearse` runs all but flex on the CPU."""

from __future__ import annotations

import pytest

from baton.compute.torch.kernels.flex import FlexBackend
from baton.compute.torch.kernels.jagged import JaggedBackend
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.decide.kv.layout import KVLayout
from tests.attention_cases import CASES, LAYERS, TORCH_WARNINGS, compare

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(*TORCH_WARNINGS)]
LAYOUT = KVLayout(layers=LAYERS, kv_heads=2, head_dim=64, block_tokens=16, dtype="float32")


@pytest.mark.parametrize("backend", [SdpaBackend(), JaggedBackend()], ids=["sdpa", "jagged"])
@pytest.mark.parametrize("window", [None, 24])
def test_ragged_batches(backend: SdpaBackend | JaggedBackend, window: int | None, device: str) -> None:
    for sizes in CASES.values():
        compare(backend, sizes, LAYOUT, 6, window, device=device)


@pytest.mark.parametrize("heads", [6, 8])
def test_flex_attention(gpu: str, heads: int) -> None:
    """Two compiled kernels for all batches. torch decodes groups of a power of two heads by a kernel of their own."""
    backend = FlexBackend()
    for window in (None, 24):
        for sizes in CASES.values():
            compare(backend, sizes, LAYOUT, heads, window, blocks_min=64, device=gpu)
