"""The native engine against transformers: every instruction set that runs here, every option of the Llama family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.engine.dtype import Dtype
from baton.engine.load_native import ARCHITECTURES, load_native_engine
from baton.engine.native.build import library_path
from baton.engine.native.library import NativeLibrary
from baton.engine.native_engine import NativeEngine
from baton.engine.resolve import resolve_model
from baton.kv.layout import KVDtype
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.unit.engine.models import VOCAB, all_logprobs, huggingface_logprobs, tiny_model

FLOAT32_TOLERANCE = 2e-4
"""Absolute, on log probabilities. The orders of sums differ, nothing else does."""
BFLOAT16_TOLERANCE = 0.3
"""The same where weights and activations, or KV, are rounded to 8 bits; the models are random and steep."""
SERVED = [name for name, config in CONFIGS.items() if config.model_type in ARCHITECTURES]


KERNELS = NativeLibrary(library_path()).usable_kernels()


def _engine(folder: Path, kernels: str, dtype: Dtype = "float32", kv_dtype: KVDtype = "float32") -> NativeEngine:
    card = resolve_model(str(folder))
    layout = card.layout(block_tokens=4, dtype=kv_dtype)
    arena = bytearray(b"\xff" * (layout.block_bytes * 20))  # NaN: what was never written must not be read
    library = NativeLibrary(library_path(), kernels)
    return load_native_engine(card, layout, memoryview(arena), library, dtype=dtype, threads=1)


@pytest.mark.parametrize("name", SERVED)
def test_float32_log_probabilities_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """At every position, for the whole vocabulary, on every instruction set that this machine has."""
    model = tiny_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    expected = huggingface_logprobs(model, TOKENS)
    for kernels in KERNELS:
        mine = all_logprobs(_engine(tmp_path, kernels), TOKENS, range(18), VOCAB)
        np.testing.assert_allclose(mine, expected, atol=FLOAT32_TOLERANCE, rtol=0, err_msg=kernels)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama_wide_heads", "qwen3", "mistral_window"])
def test_every_precision_is_near_the_exact_model(name: str, dtype: Dtype, kv_dtype: KVDtype, tmp_path: Path) -> None:
    model = tiny_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    expected = huggingface_logprobs(model, TOKENS)
    tolerance = FLOAT32_TOLERANCE if dtype == kv_dtype == "float32" else BFLOAT16_TOLERANCE
    for kernels in KERNELS:
        mine = all_logprobs(_engine(tmp_path, kernels, dtype, kv_dtype), TOKENS, range(18), VOCAB)
        np.testing.assert_allclose(mine, expected, atol=tolerance, rtol=0, err_msg=kernels)
