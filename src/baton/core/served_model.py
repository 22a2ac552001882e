"""One model of a server with several: an entry of the section `models`, and the body of `POST /cluster/models`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

from baton.core.validation import Range

MODELS_MAX = 32
"""Maximum models of a server: metrics have a label for each."""


class ServedModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several models. Settings that are left out are those at the top of the file."""

    model: str
    name: str = ""
    """As `served_name`."""
    prefill: Annotated[int, Range(least=0)] = 0
    """Workers by role. All zero: those of `topology`."""
    decode: Annotated[int, Range(least=0)] = 0
    mixed: Annotated[int, Range(least=0)] = 0
    cores: Annotated[int, Range(least=0)] = 0
    """Cores of this model alone. 0: an equal part of the others."""
    adapter: str = ""
    """Folder of a LoRA adapter to add to the weights. Not taken from the top."""
    load_format: str | None = None
    dtype: str | None = None
    weights: str | None = None
    device: str | None = None
    threads: int | None = None
    context_tokens: int | None = None
    parallel: dict[str, Any] = {}
    kv: dict[str, Any] = {}
    """Only keys that differ from the top; so in other sections."""
    batch: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    slo: dict[str, Any] = {}
    cost: dict[str, Any] = {}
    """Not taken from the top."""
    tiers: tuple[dict[str, Any], ...] = ()
