"""What a server and the agent of another host say to each other, over one TCP connection."""

from __future__ import annotations

from msgspec import Struct

from baton.core.config import Config
from baton.core.messages import RetireWorker, StartWorker
from baton.core.types import HostId, WorkerId, WorkerView
from baton.decide.kv.conversion import KVForm
from baton.serve.messages.moving import MoverNews, MoverOrder, MoverReady


class HostTerms(Struct, frozen=True, kw_only=True):
    """What a host has to know before it can join: the answer of POST /cluster/hosts."""

    port: int
    """Where it connects to, at the address that it has asked."""
    token: str
    """Proves that it has asked. Good for one connection, as long as not too many others have asked since."""
    config: Config
    """The server's, with everything resolved that its hosts must agree on, and without what is the server's alone."""


# ---- from an agent


class HostHello(Struct, frozen=True, kw_only=True, tag=True):
    """The first message of an agent. Answered with Welcome or Refused."""

    token: str
    host: HostId
    pid: int
    form: KVForm
    blocks_total: int
    mover: MoverReady
    mover_generation: int
    prices: dict[str, float] = {}
    """What it expects steps to cost its workers, by the keys of the linear cost model. Empty: it cannot say."""


class WorkerStarting(Struct, frozen=True, tag=True):
    view: WorkerView


class WorkerUp(Struct, frozen=True, tag=True):
    """It has loaded its model."""

    worker: WorkerId
    pid: int


class WorkerDown(Struct, frozen=True, tag=True):
    """Its process is certainly dead."""

    worker: WorkerId
    reason: str
    retired: bool = False
    """None follows."""


class FromWorker(Struct, frozen=True, tag=True):
    """What a worker has said, as it came over its socket."""

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
    news: MoverNews


class HostPong(Struct, frozen=True, tag=True):
    """Answers a HostPing."""


class HostLeaves(Struct, frozen=True, tag=True):
    """The agent ends, and its workers with it."""

    reason: str


# ---- to an agent


class Welcome(Struct, frozen=True, tag=True):
    """The host belongs to the cluster. It starts its workers now."""


class Refused(Struct, frozen=True, tag=True):
    """It does not, and why."""

    reason: str
    again: bool
    """It may be otherwise in a moment."""


class ForWorker(Struct, frozen=True, tag=True):
    """A message for a worker, encoded."""

    worker: WorkerId
    payload: bytes


class ForMover(Struct, frozen=True, tag=True):
    """An order for the mover of this generation, and for no later one."""

    generation: int
    order: MoverOrder


class Resize(Struct, frozen=True, tag=True):
    """Scaling wants a worker more or less on this host."""

    command: StartWorker | RetireWorker


class HostPing(Struct, frozen=True, tag=True):
    """Answered at once. An agent that hears nothing knows that its server is gone, as the server does the other way."""


class Dismissed(Struct, frozen=True, tag=True):
    """The server ends, or has given the host up: it may ask to join anew."""

    reason: str


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
ToAgentMessage = Welcome | Refused | ForWorker | ForMover | Resize | HostPing | Dismissed
