"""Fetch a model from the Hugging Face hub, where the extra `baton[hub]` is installed."""

from __future__ import annotations

from pathlib import Path

from baton.compute.models.safetensors_file import read_checkpoint
from baton.core.errors import ModelError

WANTED = (
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
    """Return the local folder of a hub model; a copy that is already in the cache is used without asking the hub.

    Raises ModelError if the extra is missing, the hub cannot be reached, or it does not give the model out.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(
            f"{name} looks like a model on the Hugging Face hub; to download it, run: pip install 'baton[hub]' "
            "(or give a local folder or .gguf file)"
        ) from error
    wanted = list(WANTED)
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
    """Tell a finished download from one that was cut off: every shard is there and none ends early."""
    if not (folder / "config.json").exists():
        return False
    try:
        return bool(read_checkpoint(folder))
    except ModelError:
        return False
