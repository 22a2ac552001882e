"""LoRA adapters: the sum of the weights, their identity, and errors for files that cannot be served."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import transformers
from safetensors.torch import load_file, save_file

from baton.compute.models.fingerprint import kv_identity
from baton.compute.models.lora import AdaptedWeights, read_adapter
from baton.compute.models.open_model import open_model, read_config
from baton.compute.models.quantized import QuantizedMatrix, quantize_groups
from baton.compute.models.resolve import resolve_model
from baton.compute.models.weights import TensorSlice
from baton.core.errors import ModelError
from tests.unit.compute.lora_models import ALPHA, RANK, merge_adapter, write_adapter
from tests.unit.compute.models import TINY, engine_of, generate, tiny_model

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    tiny_model(transformers.LlamaConfig(**TINY)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "poet", base)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_an_adapted_model_gives_the_text_of_the_merged_one(
    base: Path, adapter: Path, tmp_path: Path, kind: Literal["native", "torch"]
) -> None:
    def texts(folder: Path, added: str = "") -> list[list[int]]:
        engine, _ = engine_of(resolve_model(str(folder), adapter=added), kind=kind)
        return [generate(engine, prompt, range(16), 12) for prompt in ([1, 5, 9, 33, 7], range(3, 20))]

    adapted = texts(base, str(adapter))
    assert adapted == texts(merge_adapter(tmp_path / "merged", base, adapter))
    assert adapted != texts(base)


@pytest.mark.parametrize(
    ("config", "scale"), [({}, ALPHA / RANK), ({"use_rslora": True}, ALPHA / RANK**0.5)], ids=["alpha", "rslora"]
)
def test_parts_of_an_adapted_matrix_equal_the_parts_of_the_whole(
    base: Path, tmp_path: Path, config: dict[str, object], scale: float
) -> None:
    """Ranks read parts of matrices, and must compute with exactly the same weights."""
    folder = write_adapter(tmp_path / "adapter", base, **config)
    _, weights = open_model(resolve_model(str(base), adapter=str(folder)))
    whole = weights.read(DOWN)
    merged = load_file(merge_adapter(tmp_path / "merged", base, folder, scale) / "model.safetensors")[DOWN].numpy()
    np.testing.assert_allclose(whole, merged, rtol=1e-5, atol=1e-6)
    for part in (TensorSlice(0, range(3, 17)), TensorSlice(1, range(8, 40))):
        np.testing.assert_array_equal(weights.read(DOWN, part), whole[part.index])
    plain = open_model(resolve_model(str(base)))[1]
    assert np.array_equal(weights.read("model.norm.weight"), plain.read("model.norm.weight"))


class QuantizedWeights:
    """A base model whose file has codes for every matrix."""

    def read(self, name: str, part: TensorSlice | None = None) -> np.ndarray:
        return self.read_quantized(name).dense()

    def read_quantized(self, name: str) -> QuantizedMatrix:
        return quantize_groups(np.ones((32, 64), dtype=np.float32))


def test_the_codes_of_a_quantized_file_are_not_used_for_an_adapted_matrix(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base, modules=("mlp.down_proj",))
    adapted = AdaptedWeights(QuantizedWeights(), read_adapter(folder, read_config(resolve_model(str(base)))))
    assert adapted.read_quantized(DOWN) is None
    assert adapted.read_quantized("model.layers.0.self_attn.q_proj.weight") is not None


def test_the_kv_of_an_adapter_is_kept_apart(base: Path, adapter: Path, tmp_path: Path) -> None:
    """Different adapters of one base model, and the base itself, share no KV."""
    other = write_adapter(tmp_path / "other", base, seed=1)
    same = shutil.copytree(adapter, tmp_path / "same")
    scaled = shutil.copytree(adapter, tmp_path / "scaled")
    (scaled / "adapter_config.json").write_bytes(msgspec.json.encode({"r": RANK, "lora_alpha": 1}))
    folders = ["", *map(str, (adapter, other, scaled))]
    identities = [kv_identity(resolve_model(str(base), adapter=folder)) for folder in folders]
    assert len({identity.weights for identity in identities}) == 4
    assert kv_identity(resolve_model(str(base), adapter=str(same))).disagreements(identities[1]) == []


def _without_b(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
    save_file(tensors, path, {"format": "pt"})


def _renamed(folder: Path, old: str, new: str) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "type 'PREFIX_TUNING'"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "trains biases"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"rank_pattern": {"q_proj": 8}}, "differ by module"),
        ({"r": 0}, "rank is 0"),
        ({"r": 8}, "have shapes"),
        ({"r": "four"}, "cannot read"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(
    base: Path, tmp_path: Path, config: dict[str, object], words: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", base, **config)
    with pytest.raises(ModelError, match=words):
        resolve_model(str(base), adapter=str(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_b, "have shapes"),
        (lambda folder: _renamed(folder, "down_proj", "side_proj"), "no linear layer"),
        (lambda folder: _renamed(folder, "lora_A.weight", "lora_embedding_A"), "no lora_A or lora_B"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"no tensors"), "damaged"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter_config.json"),
    ],
)
def test_damaged_or_foreign_adapters_are_refused(
    base: Path, adapter: Path, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    change(folder)
    with pytest.raises(ModelError, match=words):
        resolve_model(str(base), adapter=str(folder))


def test_a_model_without_weights_takes_no_adapter(adapter: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        resolve_model("hash", adapter=str(adapter))
