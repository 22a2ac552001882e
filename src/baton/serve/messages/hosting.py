"""Messages between a server and the agent of another host, over one TCP connection."""

from __future__ import annotations

import math

from msgspec import Struct

from baton.core.config import Config
from baton.core.leaving import RestartWorker
from baton.core.messages import RetireWorker, StartWorker
from baton.core.types import HostId, WorkerId, WorkerView
from baton.decide.kv.conversion import KVForm
from baton.serve.messages.moving import MoverEvent, MoverOrder, MoverReady


class HostTerms(Struct, frozen=True, kw_only=True):
    """Answer to POST /cluster/hosts: everything that a host needs to join."""

    port: int
    """Port for the agent's connection, on the server's address."""
    token: str
    """Proves that the agent requested terms. Valid for one connection; expires if many other hosts request terms."""
    tls: bool
    """Whether the agent's connection uses TLS, with the certificate of HTTPS."""
    mover_secret: bytes
    """Secret of all movers of the cluster."""
    config: Config
    """The server's resolved configuration, without the settings that only the server uses."""


# ---- from an agent to the server


class HostHello(Struct, frozen=True, kw_only=True, tag=True):
    """First message of an agent. The answer is Welcome or JoinRefused."""

    token: str
    host: HostId
    pid: int
    form: KVForm
    blocks_total: int
    workers_max: int | None = None
    """Maximum number of workers that scaling may run on the host. None: no limit is known."""
    mover: MoverReady
    mover_generation: int
    arena_id: str = ""
    """32 hexadecimal digits, drawn with the arena or with the table of its blocks that the last server saved."""
    prices: dict[str, float] = {}
    """Expected prices of its workers' steps, by the keys of the linear cost model. Empty: not known."""


class WorkerStarting(Struct, frozen=True, tag=True):
    view: WorkerView


class WorkerUp(Struct, frozen=True, tag=True):
    """The worker has loaded its model."""

    worker: WorkerId
    pid: int
    attention_backend: str = ""


class WorkerDown(Struct, frozen=True, tag=True):
    """The worker's process is dead."""

    worker: WorkerId
    reason: str
    retired: bool = False
    """Whether the worker is removed for good instead of restarted."""


class FromWorker(Struct, frozen=True, tag=True):
    """A worker's message, encoded as the worker sent it."""

    worker: WorkerId
    payload: bytes


class MoverUp(Struct, frozen=True, tag=True):
    generation: int
    ready: MoverReady


class MoverDown(Struct, frozen=True, tag=True):
    generation: int
    reason: str


class FromMover(Struct, frozen=True, tag=True):
    generation: int
    event: MoverEvent


class HostPong(Struct, frozen=True, tag=True):
    """Answers a HostPing."""


class HostLeaves(Struct, frozen=True, tag=True):
    """The agent wants to leave the cluster and will end its workers."""

    reason: str


# ---- from the server to an agent


class Welcome(Struct, frozen=True, tag=True):
    """The host has joined the cluster. It starts its workers now."""


class JoinRefused(Struct, frozen=True, tag=True):
    """The host may not join."""

    reason: str
    again: bool
    """Whether the host may try again."""
    again_s: float = math.inf
    """Seconds after which the host gives up if the same reason still applies. Infinite: no limit."""


class ForWorker(Struct, frozen=True, tag=True):
    """An encoded message for a worker."""

    worker: WorkerId
    payload: bytes


class ForMover(Struct, frozen=True, tag=True):
    """An order for the mover of this generation. A later generation does not get it."""

    generation: int
    order: MoverOrder


class Resize(Struct, frozen=True, tag=True):
    """Decision to add, end or restart a worker on this host."""

    command: StartWorker | RetireWorker | RestartWorker


class HostPing(Struct, frozen=True, tag=True):
    """The agent answers with HostPong at once. Each side treats a connection that stays silent as lost."""


class Dismissed(Struct, frozen=True, tag=True):
    """The server shuts down or has given up the host. The host may ask to join again."""

    reason: str
    keep_as: str = ""
    """New id of the host's arena, under which a server finds the table of its KV. Empty: the KV is of no use."""


class LeaveCluster(Struct, frozen=True, tag=True):
    """An operator wants the host to leave in order. Then its agent ends."""

    reason: str
    restarts: bool = False
    """The agent's process is replaced by the program that is installed then, which asks to join again."""


FromAgentMessage = (
    HostHello
    | WorkerStarting
    | WorkerUp
    | WorkerDown
    | FromWorker
    | MoverUp
    | MoverDown
    | FromMover
    | HostPong
    | HostLeaves
)
ToAgentMessage = Welcome | JoinRefused | ForWorker | ForMover | Resize | HostPing | Dismissed | LeaveCluster
