"""Weights read by numpy have the same bits as those read by torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from baton.compute.models.bfloat16 import BFLOAT16, PIECE_ITEMS, to_bfloat16, to_float32
from baton.compute.models.safetensors_file import SafetensorsWeights, read_checkpoint
from baton.compute.models.weights import TensorSlice


def test_every_bfloat16_is_widened_as_torch_does() -> None:
    every = np.arange(1 << 16).astype(BFLOAT16).reshape(256, 256)
    expected = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float()
    np.testing.assert_array_equal(to_float32(every), expected.numpy())


def test_float32_is_rounded_to_bfloat16_as_torch_does() -> None:
    """Ties, the largest, the smallest, infinities and NaN, in more than one piece."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, PIECE_ITEMS + 1000, dtype=np.uint64).astype(np.uint32)
    bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000  # a tie
    bits[:6] = (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 0x00000001)
    values = bits.view(np.float32)
    found, expected = to_float32(to_bfloat16(values)), torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(found, expected)
    assert to_bfloat16(to_bfloat16(values)).dtype == BFLOAT16


def test_a_checkpoint_holds_what_was_saved_in_every_type(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    saved = {str(dtype): torch.randn(6, 8, generator=generator).to(dtype) for dtype in types}
    save_file(saved, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(read_checkpoint(tmp_path))
    for name, tensor in saved.items():
        np.testing.assert_array_equal(to_float32(weights.read(name)), tensor.float().numpy(), err_msg=name)
        columns = to_float32(weights.read(name, TensorSlice(1, range(2, 5))))
        np.testing.assert_array_equal(columns, tensor[:, 2:5].float().numpy(), err_msg=name)


@pytest.mark.parametrize("padding", range(4))
def test_data_may_begin_at_any_byte(padding: int, tmp_path: Path) -> None:
    """The format requires no alignment, but torch and C++ require that of the type."""
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    header = json.dumps({"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode() + b" " * padding
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + numbers.tobytes())
    found = SafetensorsWeights(read_checkpoint(tmp_path)).read("a")
    assert found.ctypes.data % found.itemsize == 0
    np.testing.assert_array_equal(found, numbers)
