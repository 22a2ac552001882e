"""The state of the cluster as `/cluster` shows it."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import Role


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """A worker in `/cluster`."""

    id: str
    role: Role
    pid: int
    state: str
    """`starting`, `ready` or `lost`."""
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    host: str = ""
    """Id of the worker's host."""
    role_reason: str = ""
    """Why a policy gave it this role. Empty: it was started in this role, or an operator chose it."""
    attention_backend: str = ""
    """Implementation of attention in its engine. Empty: its engine has none, or does not tell."""


class TierStatus(Struct, frozen=True, kw_only=True):
    """A tier below a host's arena."""

    name: str
    state: str = "used"
    """`used`, or `left alone`: the host has paused the tier, because its store failed or hung repeatedly."""
    kv_blocks_total: int
    """Capacity of the tier, or the number of known blocks if the store itself decides how many it keeps."""
    kv_blocks_cached: int
    kv_blocks_writing: int
    loaded_blocks: int
    """Blocks read since the host joined."""
    missed_blocks: int
    """Blocks that reads did not find since the host joined."""
    latency_s: float
    """Time to the first block of a read."""
    block_load_s: float
    """Time for each further block of a read."""
    is_measured: bool = True
    """False: no read was timed yet, so both times are the configured ones."""


class HostStatus(Struct, frozen=True, kw_only=True):
    id: str
    address: str = ""
    """Address from which other hosts pull KV blocks. Empty: the cluster has one host."""
    state: str = "ready"
    """`ready` if one of its workers takes requests, else `starting`. Lost hosts are not listed."""
    workers: tuple[str, ...] = ()
    """Ids of its workers."""
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_block_tokens: int
    kv_block_bytes: int
    tiers: tuple[TierStatus, ...] = ()
    """Tiers below the host's arena, the fastest first."""


class ClusterStatus(Struct, frozen=True, kw_only=True):
    """The body of `/cluster`."""

    workers: tuple[WorkerStatus, ...]
    hosts: tuple[HostStatus, ...]
    policy: dict[str, str]
    """Short name or `module:Class` of the policy of each family."""
    restarting: tuple[str, ...] = ()
    """Workers that the rolling restart has not restarted yet."""
    targets: dict[Role, int] = {}
    """Target of workers per role, by the scaling policy or an administrator. Roles without one are missing."""
