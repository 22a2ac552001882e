"""What the HTTP half needs to know beside the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Bounds and secrets of the HTTP edge."""

    block_tokens: int
    """Tokens per KV block: prompts are hashed in such blocks."""
    api_keys: tuple[str, ...] = ()
    """Accepted bearer keys. The client of the first is called `key-0`. Empty: everybody may ask."""
    body_bytes_max: int = 4 * 1024 * 1024
    """A larger request body is refused with 413, unread."""
    choices_max: int = 32
    """Most choices of one HTTP request: prompts times `n`. Each of them is a request to the cluster."""
    inline_bytes_max: int = 16384
    """Prompts in larger bodies are tokenized in a thread, so that the streams of others go on meanwhile."""
    seed: int | None = None
    """Where the seeds of requests without one come from. None: from the operating system."""
