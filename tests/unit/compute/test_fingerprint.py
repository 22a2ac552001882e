"""The fingerprint of a model is equal for equal files, and differs if the KV would differ."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.compute.hash_engine import hash_card
from baton.compute.models.fingerprint import kv_identity
from baton.compute.models.resolve import resolve_model
from baton.core.config import Config, PhaseConfig, WeightsChoice
from baton.decide.kv.identity import KVIdentity
from baton.serve.host.build import choose_computing
from baton.serve.host.tier_opening import fingerprint_of
from tests.unit.compute.models import TINY, tiny_model, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(transformers.LlamaConfig(**TINY)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def identity_of(path: Path) -> KVIdentity:
    return kv_identity(resolve_model(str(path)))


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | values))


def nudge_a_weight(folder: Path) -> None:
    """Change a weight a little, as fine-tuning does."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.0 + 2.0**-7
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda folder: edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rotary"),
        (lambda folder: edit_config(folder, rms_norm_eps=0.25), "configuration"),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "tokenizer"),
        (nudge_a_weight, "weights"),
    ],
)
def test_each_change_that_affects_kv_changes_the_fingerprint(
    folder: Path, tmp_path: Path, change: Callable[[Path], object], what: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert identity_of(copy).disagreements(identity_of(folder)) == []
    change(copy)
    (disagreement,) = identity_of(copy).disagreements(identity_of(folder))
    assert disagreement.startswith(what)


def test_rotary_positions_are_readable_text(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    edit_config(tmp_path / "copy", rope_parameters=scaling)
    assert identity_of(folder).rope == "base 10000"
    said = "base 500000, kind llama3, factor 8.0, original context tokens 64"
    assert identity_of(tmp_path / "copy").rope == said


def test_gguf_files_with_other_weights_have_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for seed, path in enumerate(paths):
        write_gguf(tiny_model(transformers.LlamaConfig(**TINY), seed), tmp_path / str(seed), path)
    one, two = (identity_of(path) for path in paths)
    assert one == identity_of(paths[0])
    (disagreement,) = one.disagreements(two)
    assert disagreement == f"weights {one.weights} and {two.weights}"


def test_weights_of_shards_are_those_of_one_file(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert identity_of(tmp_path).weights == identity_of(folder).weights


def test_the_hash_engine_is_a_model_too() -> None:
    assert kv_identity(hash_card()).disagreements(kv_identity(hash_card("other name"))) == []


def test_tiers_of_other_weights_have_another_fingerprint(folder: Path) -> None:
    """Quantized weights compute other KV from the same checkpoint, so a server must not read the blocks of another."""
    card = resolve_model(str(folder))
    identity = kv_identity(card)

    def fingerprint(weights: WeightsChoice, decode: PhaseConfig | None = None) -> str:
        config = Config(dtype="bfloat16", weights=weights, decode=decode or PhaseConfig())
        computing = choose_computing(config, card)
        return fingerprint_of(identity, computing.layout, computing.precision_key)

    found = [fingerprint("dense"), fingerprint("int8"), fingerprint("dense", PhaseConfig(weights="int8"))]
    assert len(set(found)) == len(found)
    assert fingerprint("int8") == found[1]
