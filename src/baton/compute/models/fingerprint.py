"""Compute the fingerprint of a model. Two hosts exchange KV only if their fingerprints are equal. No torch.

Models fine-tuned from the same model have the same tensor names, shapes and types, so the fingerprint also contains
samples of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.models.gguf_file import open_gguf
from baton.compute.models.lora import adapter_digest
from baton.compute.models.model_config import ModelConfig, RopeScaling
from baton.compute.models.open_model import read_config
from baton.compute.models.safetensors_file import read_checkpoint
from baton.core.errors import ModelError
from baton.decide.kv.identity import KVIdentity

SAMPLE_BYTES = 256
"""Bytes read from the middle of each tensor."""
DIGEST_BYTES = 8
VOCABULARY_KEYS = ("model", "pre", "tokens", "token_type", "scores", "merges")
"""The keys under `tokenizer.ggml` of a GGUF file that determine the tokens of a text."""


def kv_identity(card: ModelCard) -> KVIdentity:
    """Return the fingerprint of a model. Reads headers and a sample per tensor, in a fraction of a second.

    Raises ModelError if the files cannot be read.
    """
    if card.format == "hash":
        shape = f"{card.layers} {card.kv_heads} {card.head_dim} {card.vocab_tokens} {card.window_tokens}"
        sizes = _digest(shape.encode())
        return KVIdentity(
            model=card.name, architecture="hash", rope="", config=sizes, tokenizer="bytes", weights=f"hashes{card.path}"
        )
    config = read_config(card)
    return KVIdentity(
        model=card.name,
        architecture=config.architecture,
        rope=_rope_text(config),
        config=_digest(msgspec.json.encode(_without_rope_and_limits(config))),
        tokenizer=_digest(*_vocabulary(card)),
        weights=_digest(*_samples(card), *_adapter(card)),
    )


def _digest(*parts: bytes) -> str:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _rope_text(config: ModelConfig) -> str:
    """Return the rope settings as text: the base, and each scaling option that differs from its default."""
    words = [f"base {config.rope_theta:g}"]
    usual = msgspec.structs.asdict(RopeScaling())
    for name, value in msgspec.structs.asdict(config.rope).items():
        if value != usual[name]:
            text = _digest(msgspec.json.encode(value)) if isinstance(value, tuple) else str(value)
            words.append(f"{name.replace('_', ' ')} {text}")
    return ", ".join(words)


def _without_rope_and_limits(config: ModelConfig) -> ModelConfig:
    """Return the configuration without fields that the fingerprint covers elsewhere, or that no KV depends on."""
    return msgspec.structs.replace(
        config, rope=RopeScaling(), rope_theta=0.0, context_tokens=0, eos_token_ids=(), bos_token_id=None
    )


def _vocabulary(card: ModelCard) -> Iterator[bytes]:
    path = Path(card.path)
    if card.format == "gguf":
        metadata = open_gguf(path).metadata
        for key in VOCABULARY_KEYS:
            yield msgspec.json.encode(metadata.get(f"tokenizer.ggml.{key}"))
        return
    file = path / "tokenizer.json"
    yield file.read_bytes() if file.is_file() else b""


def _samples(card: ModelCard) -> Iterator[bytes]:
    """Yield for each tensor, sorted by name: its header entry, and bytes from its middle."""
    path = Path(card.path)
    if card.format == "gguf":
        file = open_gguf(path)
        for name, tensor in sorted(file.tensors.items()):
            yield f"{name} {tensor.type.name} {tensor.shape}".encode()
            middle = tensor.offset + max(0, tensor.size_bytes - SAMPLE_BYTES) // 2
            yield file.data[middle : middle + min(SAMPLE_BYTES, tensor.size_bytes)]
        return
    if card.format == "dummy":
        yield b"dummy"
        return
    for name, stored in sorted(read_checkpoint(path).items()):
        yield f"{name} {stored.dtype} {stored.shape}".encode()
        yield _sample_of(stored.file, stored.offset_bytes, stored.size_bytes)


def _adapter(card: ModelCard) -> Iterator[bytes]:
    if card.adapter:
        yield adapter_digest(Path(card.adapter))


def _sample_of(file: Path, offset_bytes: int, size_bytes: int) -> bytes:
    try:
        with file.open("rb") as opened:
            opened.seek(offset_bytes + max(0, size_bytes - SAMPLE_BYTES) // 2)
            return opened.read(min(SAMPLE_BYTES, size_bytes))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from error
