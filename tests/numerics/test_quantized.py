"""Weights of 4 and 8 bits equal their dequantized form, and give the same bits in every batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from baton.compute.models.quantized import QuantizedMatrix, quantize_groups, quantize_rows, stacked
from baton.compute.models.quantized_gguf import from_gguf
from baton.compute.models.resolve import resolve_model
from baton.compute.native.build import library_path
from baton.compute.native.engine import NativeEngine
from baton.compute.native.library import NativeLibrary
from baton.compute.native.load_native import Computation, load_native_engine
from tests.seeds import Seeds
from tests.unit.compute.models import part_of

BLOCK_TOKENS = 16
TOKENS = [random.Random(5).randrange(100, 49000) for _ in range(50)]
KERNELS = NativeLibrary(library_path()).usable_kernels()


def engine_with(weights: str, kernels: str, threads: int = 2) -> NativeEngine:
    """Load the embedded model (Q4_1 and Q8_0) with KV in float32, so that only the form of weights differs."""
    card = resolve_model("smollm2-135m")
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32")
    memory = memoryview(bytearray(layout.block_bytes * 16))
    library = NativeLibrary(library_path(), kernels)
    return load_native_engine(card, layout, memory, library, Computation(weights=weights, threads=threads))


def logits(engine: NativeEngine, *parts: tuple[list[int], int, int]) -> Tensor:
    """Compute (tokens, start, first block) as one step, and return the logits of each part's last token."""
    slices = [part_of(tokens, range(block, block + 4), start=start) for tokens, start, block in parts]
    firsts = engine._forward(slices)
    rows = [first + part.count - 1 for first, part in zip(firsts, slices, strict=True)]
    return torch.from_numpy(engine._logits(rows).copy())


@pytest.fixture(scope="module")
def dense() -> Tensor:
    return logits(engine_with("dense", KERNELS[0]), (TOKENS, 0, 0))[0]


@pytest.mark.parametrize("kernels", KERNELS)
def test_stored_weights_equal_their_dequantized_form(kernels: str, dense: Tensor) -> None:
    """Only activations are rounded, to 8 bits per run of 32. This moves logits (deviation 2) by 0.15."""
    found = logits(engine_with("stored", kernels), (TOKENS, 0, 0))[0]
    assert (found - dense).square().mean().sqrt() < 0.25
    assert found.argmax() == dense.argmax()


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_bits_do_not_depend_on_other_requests_of_a_step(weights: str, seeds: Seeds) -> None:
    """Alone, in chunks, with others in another order, on one thread: bitwise equal.

    Rounding to 8 bits takes long, so only a deep run does it for another engine with one thread.
    """
    engine = engine_with(weights, "")
    others = [([*TOKENS[index:], index + 7], 0, 4 * index) for index in range(1, 4)]
    alone = logits(engine, (TOKENS, 0, 0))[0]
    for start, size in ((len(TOKENS) - 5, 1), (0, 7), (0, 32)):
        if start:
            logits(engine, (TOKENS[:start], 0, 0))
        for end in range(start + size, len(TOKENS) + size, size):
            chunk = logits(engine, (TOKENS[:end], end - size, 0))[0]
        assert torch.equal(chunk, alone), size
    assert torch.equal(logits(engine, *others, (TOKENS, 0, 0))[3], alone)
    assert torch.equal(logits(engine, (TOKENS, 0, 0), *others)[0], alone)
    if weights == "stored" or seeds.deep:
        assert torch.equal(logits(engine_with(weights, "", threads=1), (TOKENS, 0, 0))[0], alone)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_codes_of_a_file_equal_the_weights_of_the_gguf_package(name: str) -> None:
    weight = np.random.default_rng(1).standard_normal((6, 128)).astype(np.float32)
    type_ = GGMLQuantizationType[name]
    data = quants.quantize(weight, type_)
    found = from_gguf(data, type_, weight.shape)
    assert found is not None
    np.testing.assert_allclose(found.dense(), quants.dequantize(data, type_), rtol=1e-6)


def test_q4_k_keeps_its_codes_and_rounds_only_its_scales() -> None:
    """All bytes are a valid super-block, except for factors that are not finite."""
    data = np.random.default_rng(2).integers(0, 256, (3, 2 * 144), dtype=np.uint8)
    for block in (0, 144):
        data[:, block : block + 4] = np.array([0.01, 0.02], dtype=np.float16).view(np.uint8)
    found = from_gguf(data, GGMLQuantizationType.Q4_K, (3, 512))
    assert found is not None
    expected = quants.dequantize(data, GGMLQuantizationType.Q4_K)
    np.testing.assert_allclose(found.dense(), expected, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("quantize", [quantize_rows, quantize_groups])
def test_rounding_to_8_bits_is_off_by_half_a_code(quantize: object) -> None:
    weight = np.random.default_rng(3).standard_normal((5, 96), dtype=np.float32)
    found: QuantizedMatrix = quantize(weight)  # type: ignore[operator]
    assert np.abs(found.dense() - weight).max() <= np.abs(weight).max() / 127 * 0.51


def test_parts_of_different_kinds_become_one_kind() -> None:
    weight = np.random.default_rng(4).standard_normal((4, 64), dtype=np.float32)
    both = stacked([quantize_rows(weight), quantize_groups(weight)])
    assert both.kind == "q8"
    assert both.codes.shape == (8, 64)
    np.testing.assert_allclose(both.dense(), np.concatenate((weight, weight)), rtol=0.0, atol=0.03)
