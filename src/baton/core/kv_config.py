"""Configuration of the KV cache: the arena, and the tiers below it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from baton.core.validation import Range

Bytes = Annotated[int, Range(least=0, most=2**50)]
KVDtypeChoice = Literal["auto", "float32", "bfloat16", "int8", "fp8", "fp4", "mxfp4"]
TierFormat = Literal["exact", "bfloat16", "float16", "int8", "fp8", "fp4", "mxfp4"]
"""Type of KV in a tier. `exact`: as in the arena."""
Preemption = Literal["cheaper", "swap", "recompute"]
"""How a preempted request restores its KV."""


class SpillConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[Space for KV of requests larger than the arena](handoff-and-tiers.md#requests-larger-than-the-arena). For CPU
    workers without ranks; no host may join."""

    bytes: Bytes = 0
    """Size. 0: such requests are refused."""
    folder: str = ""
    """Folder of an unnamed file. Empty: memory."""
    bytes_per_s: Annotated[float, Range(least=1e6)] = 1e9
    """Assumed read bandwidth."""
    tokens_per_s_min: Annotated[float, Range(least=0.001)] = 1.0
    """Minimum decode rate: limits the length of requests."""


class KVConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arena that holds the KV cache."""

    block_tokens: Annotated[int, Range(least=1, most=1024)] = 16
    """Tokens per KV block. Only full blocks are shared between requests."""
    bytes: Bytes = 0
    """Size of the arena. 0: 2 GiB, but 1 to 64 full contexts, and at most 1/4 of all and 1/2 of the free memory."""
    blocks: Annotated[int, Range(least=0, most=2**31)] = 0
    """Size of the arena in blocks. Overrides `bytes` unless it is 0."""
    allocate: Literal["on_demand", "longest"] = "on_demand"
    """`on_demand` grants blocks as a request grows, and preempts if none is left. `longest` reserves blocks for the
    longest possible output: no preemption, but fewer requests at once."""
    preemption: Preemption = "cheaper"
    """How a preempted request restores its KV: `recompute` computes it again, `swap` reads it from the tiers, `cheaper`
    does what takes less time."""
    spill: SpillConfig = SpillConfig()
    dtype: KVDtypeChoice = "auto"
    """Precision of KV. `auto`: that in which decode workers compute. `int8` and `fp8` (e4m3) store one scale per token
    and head, `fp4` (e2m1) one per 16 numbers, `mxfp4` one per 32. All need the native engine, except `fp8`."""


class TierConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier below the arena. Unused blocks are written to it, and read back if that is predicted to be cheaper than a
    recompute. A tier on this machine belongs to the server's own host; any other tier is used by all hosts."""

    url: str
    """A store: `file:///var/cache/kv?bytes=100e9`, `redis://host:6379/0?ttl_s=3600`, `s3://bucket/prefix`,
    `pool://host:8700`."""
    bytes_per_s: float = 1e9
    """Assumed read bandwidth before the first read. Afterwards it is measured."""
    latency_s: float = 0.002
    """Assumed time to the first byte of a read. Afterwards it is measured."""
    when: Literal["cached", "sealed"] = "cached"
    """Write blocks once no request uses them (`cached`), or as soon as they are full (`sealed`)."""
    format: TierFormat = "exact"
    """Type to which KV is rounded in this tier. Later hits read the rounded values."""
    exact_layers: Annotated[int, Range(least=0, most=10_000)] = 0
    """Layers that are not rounded: half of them the first, half the last."""
    list_s: Annotated[float, Range(least=0, most=86400)] = 30.0
    """Interval for listing a shared store, to find blocks that other servers have written. At least 20 times the
    duration of a listing. 0: only at the start."""
