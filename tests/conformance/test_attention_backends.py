"""Every attention backend gives the formula's result on the same ragged batches over scattered blocks.

Blocks of no request, and slots after a request's last token, hold NaN. Triton's kernels run in its interpreter, the
native engine's attention on every instruction set of this machine. Its latents are compared in tests/numerics.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary
from baton.compute.ranks import context_attention
from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.flex import FlexBackend
from baton.compute.torch.kernels.jagged import JaggedBackend
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.decide.kv.layout import KVLayout
from tests.attention_cases import CASES, LAYERS, TORCH_WARNINGS, compare
from tests.context_backend import ContextRanksBackend
from tests.native_attention import NativeBackend
from tests.seeds import Seeds
from tests.triton_interpreter import LATENT_ROPE, InterpretedBackend

TORCH: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": SdpaBackend,
    "jagged": JaggedBackend,
    "context ranks": lambda: ContextRanksBackend(2),
}
INTERPRETED = {"mixed"}
"""The cases that Triton's interpreter computes in a run that is not deep: the others take minutes."""
INSTRUCTION_SETS = NativeLibrary(library_path()).usable_kernels()
pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)


@pytest.fixture(scope="module", params=[*TORCH, "triton", "fused", *(f"native {name}" for name in INSTRUCTION_SETS)])
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    name: str = request.param
    if name in TORCH:
        yield TORCH[name]()
    elif name in ("triton", "fused"):
        if importlib.util.find_spec("triton") is None:
            pytest.skip('triton is not installed: pip install -e ".[triton]"')
        interpreted = InterpretedBackend("fused" if name == "fused" else "triton")
        yield interpreted
        interpreted.close()
    else:
        yield NativeBackend(name.removeprefix("native "))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("group", "window"), [(1, 1), (3, None), (3, 24)])
def test_ragged_batches(backend: AttentionBackend, case: str, window: int | None, group: int, seeds: Seeds) -> None:
    if isinstance(backend, InterpretedBackend) and not seeds.deep and (case not in INTERPRETED or window != 24):
        pytest.skip("Triton's interpreter computes this case in a deep run")
    layout = KVLayout(layers=LAYERS, kv_heads=2, head_dim=8, block_tokens=16, dtype="float32")
    compare(backend, CASES[case], layout, 2 * group, window)


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_that_masks_cut(backend: AttentionBackend, window: int | None) -> None:
    if isinstance(backend, InterpretedBackend):
        pytest.skip("Triton's kernels have no masks")
    layout = KVLayout(layers=LAYERS, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
    compare(backend, [(600, 20), (530, 0), (1, 3)], layout, 2, window)


def test_context_ranks_on_gpus_attend_by_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_attention, "partial_attention", context_attention.plain_partial_attention)
    layout = KVLayout(layers=LAYERS, kv_heads=2, head_dim=8, block_tokens=16, dtype="float32")
    for case in CASES.values():
        compare(ContextRanksBackend(2), case, layout, 6, 24)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("block_tokens", [8, 128])
def test_sizes_of_heads_and_blocks(backend: AttentionBackend, head_dim: int, block_tokens: int) -> None:
    layout = KVLayout(layers=LAYERS, kv_heads=1, head_dim=head_dim, block_tokens=block_tokens, dtype="float32")
    compare(backend, [(1, 9), (10, 130)], layout, 2, None)


def test_latent_vectors_are_keys_and_values(backend: AttentionBackend) -> None:
    """The rotary part of a latent belongs to its key only, so results need not have it."""
    if isinstance(backend, NativeBackend):
        pytest.skip("the native engine projects queries into the space of latents itself: see tests/numerics")
    layout = KVLayout(layers=LAYERS, kv_heads=1, head_dim=576, block_tokens=16, dtype="float32", planes=1)
    compare(backend, [(1, 40), (7, 12)], layout, 4, None, values=576 - LATENT_ROPE)


def test_requests_share_the_blocks_of_a_prefix(backend: AttentionBackend) -> None:
    layout = KVLayout(layers=LAYERS, kv_heads=2, head_dim=8, block_tokens=16, dtype="float32")
    compare(backend, [(1, 40), (9, 36)], layout, 4, None, shared_blocks=2)


def test_random_batches(backend: AttentionBackend, seeds: Seeds) -> None:
    if isinstance(backend, InterpretedBackend) and not seeds.deep:
        pytest.skip("tests/unit/compute/test_triton_decode.py plays random batches in the interpreter")

    @settings(max_examples=100 if seeds.deep else 15)
    @given(
        sizes=st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 17]), st.integers(0, 70)), min_size=1, max_size=4),
        block_tokens=st.sampled_from([8, 16, 32]),
        window=st.sampled_from([None, 1, 9, 64]),
    )
    def equal(sizes: list[tuple[int, int]], block_tokens: int, window: int | None) -> None:
        layout = KVLayout(layers=LAYERS, kv_heads=2, head_dim=8, block_tokens=block_tokens, dtype="float32")
        compare(backend, sizes, layout, 4, window)

    equal()


@pytest.mark.deep
@pytest.mark.parametrize("group", [1, 3])
def test_flex_compiles_two_forms_for_all_batches(group: int) -> None:
    """Batch sizes, tables, lengths and windows differ. torch compiles each form in 10 s of CPU."""
    torch.compiler.reset()
    counters["stats"].clear()
    layout = KVLayout(layers=LAYERS, kv_heads=2, head_dim=8, block_tokens=16, dtype="float32")
    backend = FlexBackend()
    for sizes in (*CASES.values(), [(1, 12)] * 19):
        for window in (None, 1, 24):
            compare(backend, sizes, layout, 2 * group, window, blocks_min=64)
    compare(backend, [(1, 40), (9, 36)], layout, 2 * group, None, shared_blocks=2, blocks_min=64)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.deep
@pytest.mark.parametrize(("head_dim", "block_tokens", "planes"), [(80, 8, 2), (256, 128, 2), (576, 16, 1)])
def test_sizes_of_flex_attention(head_dim: int, block_tokens: int, planes: int) -> None:
    torch.compiler.reset()
    layout = KVLayout(
        layers=LAYERS, kv_heads=1, head_dim=head_dim, block_tokens=block_tokens, dtype="float32", planes=planes
    )
    compare(FlexBackend(), [(1, 9), (1, 200), (10, 130)], layout, 2, 64)
