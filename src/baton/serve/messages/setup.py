"""What a worker process is told when it starts, with the arena's descriptor beside it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.core.config import BatchLimits, Plugin, SpeculationConfig, WeightsChoice
from baton.core.copies import LayersDone
from baton.core.messages import (
    BlocksGranted,
    PreemptRequest,
    Shutdown,
    StartRequest,
    StepReport,
    StopRequest,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from baton.core.types import WorkerId, WorkerView
from baton.decide.kv.layout import KVLayout


class WorkerSetup(Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a worker."""

    view: WorkerView
    card: ModelCard
    layout: KVLayout
    hash_tokens: int
    """Tokens that each of a request's hashes is of."""
    arena_bytes: int
    dtype: Dtype
    weights: WeightsChoice = "dense"
    device: str = "cpu"
    """`cpu`, or `cuda:N`: then the descriptor beside the message holds the arena's CUDA handle."""
    threads: int
    cores: tuple[int, ...]
    """Cores that the worker is pinned to. Empty: any."""
    guest_cores: tuple[int, ...] = ()
    """Cores of another worker, which this one's steps use while their owner sleeps."""
    limits: BatchLimits
    batching: Plugin
    fairness: Plugin
    speculation: SpeculationConfig = SpeculationConfig()
    cost: dict[str, Any] = {}
    """As in the configuration: what `load_cost` takes."""
    step_log: str = ""
    """Folder for the log of its steps. Empty: none is written."""
    log_bytes_max: int = 0
    """Where that log ends."""


class Ping(Struct, frozen=True, tag=True):
    """Answered with Pong between two steps: a worker that does not answer in time hangs."""


class Pong(Struct, frozen=True, tag=True):
    worker: WorkerId


ToWorkerMessage = WorkerSetup | StartRequest | StopRequest | BlocksGranted | PreemptRequest | Shutdown | Ping
FromWorkerMessage = StepReport | LayersDone | WorkerReady | WorkerProgress | WorkerFailed | Pong
