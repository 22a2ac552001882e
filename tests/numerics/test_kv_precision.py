"""KV in 8 and 4 bits: the stored KV, read by torch, equals float32 KV after rounding, and bits are invariant."""

from __future__ import annotations

import random
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from baton.compute.load_engine import EngineChoice, load_engine
from baton.compute.models.resolve import resolve_model
from baton.compute.native.build import library_path
from baton.compute.native.engine import NativeEngine
from baton.compute.native.library import NativeLibrary
from baton.compute.native.load_native import Computation, load_native_engine
from baton.compute.torch.kernels import e4m3
from baton.compute.torch.kernels.paged_kv import TORCH_DTYPES
from baton.core.errors import ModelError
from baton.core.types import BlockId
from baton.decide.kv.conversion import Conversion
from baton.decide.kv.layout import KVDtype
from baton.move.number_formats import decode, encode
from baton.move.transport.convert import convert
from tests.unit.compute.models import TINY, part_of, tiny_model
from tests.unit.compute.steps import all_logprobs

KERNELS = NativeLibrary(library_path()).usable_kernels()
BLOCK_TOKENS = 4
BLOCKS = 46
TOKENS = [random.Random(6).randrange(3, 96) for _ in range(90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads of 20 numbers, no multiple of the vector length of any instruction set."""
    return model_folder(tmp_path_factory.mktemp("model"), head_dim=20)


@pytest.fixture(scope="module")
def folder_of_32(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads of 32 numbers, a whole group of 4-bit formats."""
    return model_folder(tmp_path_factory.mktemp("model"), head_dim=32)


def model_folder(folder: Path, head_dim: int) -> str:
    tiny_model(transformers.LlamaConfig(**TINY | {"head_dim": head_dim})).save_pretrained(folder)
    return str(folder)


def engine_with(folder: str, kv: KVDtype, kernels: str = "", threads: int = 2) -> tuple[NativeEngine, bytearray]:
    card = resolve_model(folder)
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype=kv)
    arena = bytearray(layout.block_bytes * BLOCKS)
    library = NativeLibrary(library_path(), kernels)
    return load_native_engine(
        card, layout, memoryview(arena), library, Computation(dtype="float32", threads=threads)
    ), arena


def logits(engine: NativeEngine, *parts: tuple[list[int], int, int]) -> Tensor:
    """Compute (tokens, start, first block) as one step, and return the logits of each part's last token."""
    blocks = -(-len(TOKENS) // BLOCK_TOKENS)
    slices = [part_of(tokens, range(first, first + blocks), start=start) for tokens, start, first in parts]
    firsts = engine._forward(slices)
    rows = [first + part.count - 1 for first, part in zip(firsts, slices, strict=True)]
    return torch.from_numpy(engine._logits(rows).copy())


def first_layer(engine: NativeEngine, arena: bytearray) -> Tensor:
    """Return layer 0 of the first two blocks: [2 blocks, 2 planes, tokens, kv_heads, head_dim], float32."""
    layout = engine.layout
    raw = torch.frombuffer(arena, dtype=torch.uint8)[: 2 * layout.block_bytes]
    heads = raw.view(2, layout.layers, 2, BLOCK_TOKENS, layout.kv_heads, layout.head_bytes)[:, 0]
    if layout.dtype in TORCH_DTYPES and layout.dtype != "fp8":
        return heads.contiguous().view(TORCH_DTYPES[layout.dtype]).float()
    if layout.dtype in ("fp4", "mxfp4"):
        read = np.empty((*heads.shape[:-1], layout.head_dim), np.float32)
        decode(heads.contiguous().numpy(), layout.dtype, read)
        return torch.from_numpy(read)
    numbers, scales = heads[..., : layout.head_dim].contiguous(), heads[..., layout.head_dim :].contiguous()
    stored = numbers.view(torch.int8 if layout.dtype == "int8" else torch.float8_e4m3fn).float()
    return stored * scales.view(torch.float32)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("kv", "step"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_stored_kv_equals_float32_kv_after_rounding(folder: str, kv: KVDtype, step: float, kernels: str) -> None:
    """Layer 0 sees no KV before it is stored, so both arenas are given the same numbers. step: half a code, relative.

    Logits of this random model move by up to a fifth of the largest with three bits of mantissa.
    """
    exact_engine, exact_arena = engine_with(folder, "float32", kernels)
    engine, arena = engine_with(folder, kv, kernels)
    exact_logits, found_logits = logits(exact_engine, (TOKENS, 0, 0)), logits(engine, (TOKENS, 0, 0))
    exact, found = first_layer(exact_engine, exact_arena), first_layer(engine, arena)
    largest = exact.abs().amax(-1, keepdim=True)
    bound = largest * step if kv == "int8" else exact.abs() * step + largest / 448 / 512
    assert ((found - exact).abs() <= bound * 1.001).all()
    most = 0.05 if kv == "int8" else 0.25
    assert (found_logits - exact_logits).abs().max() < most * exact_logits.abs().max()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kv", ["fp4", "mxfp4"])
def test_4_bits_equal_float32_kv_after_rounding(folder_of_32: str, kv: KVDtype, kernels: str) -> None:
    exact_engine, exact_arena = engine_with(folder_of_32, "float32", kernels)
    engine, arena = engine_with(folder_of_32, kv, kernels)
    exact_logits, found_logits = (logits(each, (TOKENS, 0, 0)) for each in (exact_engine, engine))
    exact, found = first_layer(exact_engine, exact_arena), first_layer(engine, arena)
    assert ((found - exact).abs() <= exact.abs() / 4 + exact.abs().amax(-1, keepdim=True) / 10).all()
    assert (found_logits - exact_logits).abs().max() < 0.6 * exact_logits.abs().max()
    test_converted_kv_has_the_bytes_of_the_engine(folder_of_32, kv, kernels)


@pytest.mark.parametrize("kv", ["fp4", "mxfp4"])
def test_4_bits_need_heads_of_whole_groups(folder: str, kv: KVDtype) -> None:
    with pytest.raises(ModelError, match="no whole groups in heads of 20"):
        engine_with(folder, kv)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kv", ["bfloat16", "int8", "fp8"])
def test_converted_kv_has_the_bytes_of_the_engine(folder: str, kv: KVDtype, kernels: str) -> None:
    """Layer 0 computes the same numbers for every KV type. Converted back, they are what the engine reads."""
    exact_engine, exact_arena = engine_with(folder, "float32", kernels)
    engine, arena = engine_with(folder, kv, kernels)
    logits(exact_engine, (TOKENS, 0, 0)), logits(engine, (TOKENS, 0, 0))
    blocks = tuple(BlockId(block) for block in range(-(-len(TOKENS) // BLOCK_TOKENS)))
    converted, widened = bytearray(len(arena)), bytearray(len(exact_arena))
    narrow, wide = (Conversion(*pair) for pair in permutations((exact_engine.layout, engine.layout)))
    convert(narrow.plan(blocks, blocks, range(len(TOKENS))), memoryview(exact_arena), memoryview(converted))
    assert torch.equal(first_bytes(engine, converted), first_bytes(engine, arena))
    assert first_bytes(engine, arena).any()
    convert(wide.plan(blocks, blocks, range(len(TOKENS))), memoryview(arena), memoryview(widened))
    assert torch.equal(first_layer(exact_engine, widened), first_layer(engine, arena))


def first_bytes(engine: NativeEngine, arena: bytearray) -> Tensor:
    """Return layer 0 of every block."""
    return torch.frombuffer(arena, dtype=torch.uint8).view(BLOCKS, engine.layout.layers, -1)[:, 0]


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_chunks_batches_and_threads_change_no_bit(folder: str, kv: KVDtype) -> None:
    engine, _ = engine_with(folder, kv)
    alone = logits(engine, (TOKENS, 0, 0))[0]
    for start in range(0, len(TOKENS), 15):
        chunk = logits(engine, (TOKENS[: start + 15], start, 0), (TOKENS[::-1], 0, 23))[0]
    assert torch.equal(chunk, alone)
    assert torch.equal(logits(engine_with(folder, kv, threads=1)[0], (TOKENS, 0, 0))[0], alone)


@pytest.mark.parametrize("kv", ["fp4", "mxfp4"])
def test_chunks_batches_and_threads_change_no_bit_of_4_bits(folder_of_32: str, kv: KVDtype) -> None:
    test_chunks_batches_and_threads_change_no_bit(folder_of_32, kv)


def test_a_block_has_the_size_of_its_numbers_and_scales(folder: str) -> None:
    card = resolve_model(folder)
    assert card.layout(block_tokens=4, dtype="int8").block_bytes == 4 * 3 * 2 * 2 * (20 + 4)
    assert card.layout(block_tokens=4, dtype="bfloat16").block_bytes == 4 * 3 * 2 * 2 * 20 * 2


def test_the_torch_engine_names_kv_types_that_it_cannot_store(folder: str) -> None:
    card = resolve_model(folder)
    layout = card.layout(block_tokens=4, dtype="int8")
    with pytest.raises(ModelError, match="no KV cache in int8"):
        load_engine(card, layout, memoryview(bytearray(layout.block_bytes)), choice=EngineChoice(kind="torch"))


@pytest.mark.parametrize("attention", ["sdpa", "jagged", "reference"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_the_torch_engine_computes_over_fp8_as_the_native_one(folder: str, attention: str) -> None:
    """The same log probabilities, and cells that either engine can read."""
    native, arena = engine_with(folder, "fp8")
    theirs = bytearray(len(arena))
    layout = resolve_model(folder).layout(block_tokens=BLOCK_TOKENS, dtype="fp8")
    choice = EngineChoice(kind="torch", attention=attention)
    engine = load_engine(resolve_model(folder), layout, memoryview(theirs), choice=choice)
    table = range(BLOCKS // 2)
    mine, other = (all_logprobs(each, TOKENS, table, TINY["vocab_size"]) for each in (engine, native))
    assert np.abs(mine - other).max() < 2e-2
    differing = sum(a != b for a, b in zip(arena, theirs, strict=True))
    assert sum(map(bool, arena)) > 0
    assert differing < len(arena) // 50


@given(arrays(np.float32, (3, 20), elements=st.floats(-(2.0**127), 2.0**127, width=32) | st.just(float("nan"))))
def test_torch_rounds_to_fp8_as_the_wire_does(numbers: np.ndarray) -> None:
    """The same bits, and an error of at most 1/16 of a number, or 1/458752 of the largest of its head."""
    expected, decoded = np.zeros((3, 24), np.uint8), np.zeros((3, 20), np.float32)
    encode(numbers.copy(), "fp8", expected)
    cells = e4m3.encode(torch.from_numpy(numbers))
    assert cells.numpy().tobytes() == expected.tobytes()
    decode(expected, "fp8", decoded)
    found = e4m3.decode(cells, torch.float32).numpy()
    assert found.tobytes() == decoded.tobytes()
    largest = np.nan_to_num(np.abs(numbers)).max(-1, keepdims=True)
    fits = np.nan_to_num(np.abs(numbers), nan=0.0)
    bound = np.maximum(fits / 16, largest / 458752) * 1.001
    exact = np.nan_to_num(numbers)
    usual = ((largest < 1e38) & (largest > 1e-35))[:, 0]
    assert (np.abs(found - exact)[usual] <= bound[usual]).all()
