"""Messages between a host and its worker processes, beginning with the setup."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype, Precision
from baton.core.config import (
    AttentionName,
    BatchLimits,
    ParallelConfig,
    Plugin,
    SandboxConfig,
    SpeculationConfig,
    WeightsChoice,
)
from baton.core.copies import LayersDone
from baton.core.messages import StepReport, WorkerCommand, WorkerFailed, WorkerProgress, WorkerReady
from baton.core.types import WorkerId, WorkerView
from baton.decide.kv.layout import KVLayout


class WorkerSetup(Struct, frozen=True, kw_only=True, tag=True):
    """First message to a worker. The descriptors of the arena and of a file for its weights are attached."""

    view: WorkerView
    card: ModelCard
    layout: KVLayout
    hash_tokens: int
    """Tokens per block hash of a request."""
    arena_bytes: int
    spill_blocks: int = 0
    """Blocks in the spill space, whose descriptor follows that of the arena. 0: there is none."""
    dtype: Dtype
    weights: WeightsChoice = "dense"
    phases: dict[str, Precision] = {}
    """Precision by the kind of the worker. Empty: `dtype` and `weights` apply to all."""
    attention_backend: AttentionName = "auto"
    parallel: ParallelConfig = ParallelConfig()
    """The ranks of the worker. `layout` has their numbers too."""
    device: str = "cpu"
    """`cpu`, or `cuda:N`: then the attached descriptor holds the arena's CUDA handles."""
    threads: int
    cores: tuple[int, ...]
    """Cores that the worker is pinned to. Empty: not pinned."""
    guest_cores: tuple[int, ...] = ()
    """Cores of another worker. This worker uses them for its steps while the other one sleeps."""
    limits: BatchLimits
    batching: Plugin
    fairness: Plugin
    speculation: SpeculationConfig = SpeculationConfig()
    sandbox: SandboxConfig = SandboxConfig()
    """Limits for the processing of grammars."""
    cost: dict[str, Any] = {}
    """Cost model as in the configuration, for `load_cost`."""
    step_log: str = ""
    """Folder for the log of the worker's steps. Empty: no log."""
    log_bytes_max: int = 0
    """Maximum size of the step log."""

    @property
    def precision(self) -> Precision:
        """The precision of this worker."""
        return self.phases.get(self.view.kind, Precision(self.dtype, self.weights))


class Ping(Struct, frozen=True, tag=True):
    """A worker answers with Pong between two steps. One that does not answer in time is considered hung and killed."""


class Pong(Struct, frozen=True, tag=True):
    worker: WorkerId


ToWorkerMessage = WorkerSetup | WorkerCommand | Ping
FromWorkerMessage = StepReport | LayersDone | WorkerReady | WorkerProgress | WorkerFailed | Pong
