"""What must agree before one host can use another's KV: numbers that another model made are noise, and look like KV."""

from __future__ import annotations

from msgspec import Struct


class KVIdentity(Struct, frozen=True, kw_only=True):
    """The fingerprint of a model, as far as its KV depends on it. Hashes are hexadecimal."""

    model: str
    """For messages: two names of the same files are one model."""
    architecture: str
    rope: str
    """Rotary positions in words: base, and how it is scaled. Empty: the model has none."""
    config: str
    """Hash of everything else that its configuration says about a forward pass."""
    tokenizer: str
    """Hash of the vocabulary: the same text must be the same tokens."""
    weights: str
    """Hash of what the weight files say about themselves (names, shapes, types), and of samples of every tensor."""

    def disagreements(self, other: KVIdentity) -> list[str]:
        """Say what differs, with both values. Empty: KV of one is KV of the other, but for how it lies."""
        pairs = (
            ("architecture", self.architecture, other.architecture),
            ("rotary positions", self.rope, other.rope),
            ("configuration", self.config, other.config),
            ("tokenizer", self.tokenizer, other.tokenizer),
            ("weights", self.weights, other.weights),
        )
        return [f"{what} {ours or 'none'} and {theirs or 'none'}" for what, ours, theirs in pairs if ours != theirs]
