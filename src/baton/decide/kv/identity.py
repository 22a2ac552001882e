"""Identity of the model that produced KV. KV of another model looks valid but is noise, so hosts compare identities."""

from __future__ import annotations

from msgspec import Struct


class KVIdentity(Struct, frozen=True, kw_only=True):
    """Fingerprint of everything in a model that its KV depends on. Hashes are hexadecimal."""

    model: str
    """Name for messages. It is not compared: the same files may have two names."""
    architecture: str
    rope: str
    """Rotary position embedding as text: base and scaling. Empty: the model has none."""
    config: str
    """Hash of all other configuration values that affect the forward pass."""
    tokenizer: str
    """Hash of the vocabulary: equal text must give equal tokens."""
    weights: str
    """Hash of the tensor names, shapes and types, and of samples of every tensor."""

    def disagreements(self, other: KVIdentity) -> list[str]:
        """Return every property that differs, with both values. Empty: KV is interchangeable apart from its layout."""
        pairs = (
            ("architecture", self.architecture, other.architecture),
            ("rotary positions", self.rope, other.rope),
            ("configuration", self.config, other.config),
            ("tokenizer", self.tokenizer, other.tokenizer),
            ("weights", self.weights, other.weights),
        )
        return [f"{what} {ours or 'none'} and {theirs or 'none'}" for what, ours, theirs in pairs if ours != theirs]
