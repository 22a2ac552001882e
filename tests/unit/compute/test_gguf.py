"""GGUF files: every supported quantization, the order of rows, and damaged files."""

from __future__ import annotations

import contextlib
import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Quant
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.compute.models.bfloat16 import to_float32
from baton.compute.models.gguf_file import open_gguf
from baton.compute.models.gguf_names import gguf_name
from baton.compute.models.open_model import read_config
from baton.compute.models.resolve import resolve_model
from baton.compute.models.safetensors_file import read_checkpoint
from baton.compute.models.tensor_names import expected_shapes
from baton.compute.models.weights_gguf import GGUFWeights
from baton.core.errors import ModelError
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.unit.compute.models import (
    TINY,
    VOCAB,
    add_sizes,
    all_logprobs,
    close_gguf,
    engine_of,
    huggingface_logprobs,
    tiny_llama,
    tiny_model,
    write_gguf,
)

WIDE = TINY | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "tie_word_embeddings": True}
PROMISED = [Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q4_K, Quant.Q6_K]
HALF_SCALES = {Quant.Q4_K: (0, 2), Quant.Q6_K: (208,)}
"""The places of the float16 scales in a block, for types that the package can read but not write."""


@pytest.mark.parametrize("quant", PROMISED, ids=lambda quant: quant.name)
def test_dequantized_weights_equal_those_of_the_gguf_package(quant: Quant, tmp_path: Path) -> None:
    """Bitwise, for every tensor of a model in this type. Query and key rows are in Hugging Face's order."""
    path, written = tmp_path / "model.gguf", {}
    config = transformers.LlamaConfig(**WIDE)
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    config.save_pretrained(tmp_path)
    rng = np.random.default_rng(int(quant))
    for name, shape in _shapes(config).items():
        kind = quant if len(shape) == 2 else Quant.F32
        raw = _quantized(rng, shape, kind)
        writer.add_tensor(gguf_name(name).tensor, raw, raw_dtype=kind)
        written[name] = gguf.quants.dequantize(raw, kind)
    close_gguf(writer)
    card = resolve_model(str(path))
    weights = GGUFWeights(open_gguf(path), read_config(card))
    for name, expected in written.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads is not None:
            expected = expected.reshape(heads, -1, 2, 256).swapaxes(1, 2).reshape(expected.shape)
        np.testing.assert_array_equal(to_float32(weights.read(name)), expected, err_msg=name)


def test_a_gguf_model_equals_its_source(tmp_path: Path) -> None:
    """The same weights through GGUF's names and rows give transformers' log probabilities."""
    model = tiny_model(CONFIGS["llama_untied"])
    write_gguf(model, tmp_path / "source", tmp_path / "model.gguf")
    engine, _ = engine_of(resolve_model(str(tmp_path / "model.gguf")))
    mine = all_logprobs(engine, TOKENS, range(18), VOCAB)
    np.testing.assert_allclose(mine, huggingface_logprobs(model, TOKENS), atol=2e-4, rtol=0)


def test_rope_freqs_carry_llama3_scaling(tmp_path: Path) -> None:
    """GGUF has a tensor of divisors where config.json has the four numbers of llama3."""
    model = tiny_model(CONFIGS["llama3_rope"])
    inner = model.model.rotary_emb.inv_freq
    plain = 1.0 / (5e3 ** (torch.arange(0, 8, 2).float() / 8))
    write_gguf(model, tmp_path / "source", tmp_path / "model.gguf", rope_freqs=(plain / inner).tolist())
    engine, _ = engine_of(resolve_model(str(tmp_path / "model.gguf")))
    mine = all_logprobs(engine, TOKENS, range(18), VOCAB)
    np.testing.assert_allclose(mine, huggingface_logprobs(model, TOKENS), atol=2e-4, rtol=0)


@pytest.mark.parametrize("divisor", [0.0, math.nan, math.inf])
def test_a_divisor_of_a_frequency_is_positive_and_finite(tmp_path: Path, divisor: float) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model(CONFIGS["llama3_rope"]), tmp_path / "source", path, rope_freqs=[1.0, divisor, 1.0, 1.0])
    with pytest.raises(ModelError, match="a divisor of a frequency"):
        resolve_model(str(path))


def test_the_header_reads_like_the_packages_reader(tmp_path: Path) -> None:
    """Every metadata entry and every tensor's type, shape and place."""
    write_gguf(tiny_llama(), tmp_path / "source", tmp_path / "model.gguf")
    mine, theirs = open_gguf(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert mine.metadata == {key: theirs.fields[key].contents() for key in keys}
    assert {
        tensor.name: (
            tensor.tensor_type,
            tuple(int(size) for size in tensor.shape)[::-1],
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in theirs.tensors
    } == {
        tensor.name: (tensor.type, tensor.shape, tensor.offset, tensor.size_bytes) for tensor in mine.tensors.values()
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(tiny_llama(), folder / "source", folder / "model.gguf")
    return (folder / "model.gguf").read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(small: bytes, tmp_path: Path, cut: float) -> None:
    """A truncated download is never loaded."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(small[: int(cut * (len(small) - 32))])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        resolve_model(str(path))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 1500), value=st.integers(0, 255))
def test_a_damaged_header_is_an_error_and_never_a_crash(small: bytes, tmp_path: Path, where: int, value: int) -> None:
    """A wrong byte of the header gives a ModelError, or a model with other text (such as a name)."""
    path = tmp_path / "odd.gguf"
    path.write_bytes(small[:where] + bytes((value,)) + small[where + 1 :])
    with contextlib.suppress(ModelError):
        assert resolve_model(str(path)).format == "gguf"


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve_model(str(path))


def test_a_future_version_is_refused(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "future.gguf"
    path.write_bytes(small[:4] + struct.pack("<I", 9) + small[8:])
    with pytest.raises(ModelError, match="version 9"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"llama.block_count", b"llama.block_COUNT", "block_count"),
        (b"blk.1.attn_k.weight", b"blk.9.attn_k.weight", "lacks 1 of"),
        (b"token_embd.weight", b"token_EMBD.weight", "token_embd"),
    ],
)
def test_an_error_names_the_missing_entry(small: bytes, tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small.replace(old, new, 1))
    with pytest.raises(ModelError, match=message):
        resolve_model(str(path))


def test_another_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    close_gguf(writer)
    with pytest.raises(ModelError, match=r"mamba; Baton serves llama, mistral, qwen2, qwen3"):
        resolve_model(str(path))


def test_shapes_that_disagree_are_both_named(tmp_path: Path) -> None:
    model = tiny_llama()
    write_gguf(model, tmp_path / "source", tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    key = b"llama.feed_forward_length" + struct.pack("<I", 4)
    assert data.count(key + struct.pack("<I", 48)) == 1
    (tmp_path / "model.gguf").write_bytes(data.replace(key + struct.pack("<I", 48), key + struct.pack("<I", 64)))
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \[48, 32\], its config says \[64, 32\]"):
        resolve_model(str(tmp_path / "model.gguf"))


def _shapes(config: transformers.LlamaConfig) -> dict[str, tuple[int, ...]]:
    model = transformers.AutoModelForCausalLM.from_config(config)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    return {name: tuple(model.state_dict()[name].shape) for name in names}


def _quantized(rng: np.random.Generator, shape: tuple[int, ...], kind: Quant) -> np.ndarray:
    """Make raw rows of a type: by the package, or random blocks with small scales for types that it cannot write."""
    if kind not in HALF_SCALES:
        return gguf.quants.quantize(rng.standard_normal(shape, dtype=np.float32), kind)
    items, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // items, size), dtype=np.uint8)
    for at in HALF_SCALES[kind]:
        scale = rng.uniform(-0.1, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def test_expected_shapes_are_those_of_transformers(tmp_path: Path) -> None:
    """Names and shapes are compared for every architecture."""
    for name, config in CONFIGS.items():
        folder = tmp_path / name
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        theirs = {key: tensor.shape for key, tensor in read_checkpoint(folder).items()}
        assert expected_shapes(read_config(resolve_model(str(folder)))) == theirs, name
