"""Messages about leaving hosts and rolling restarts: running requests first move elsewhere, with their KV."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import HostId, WorkerId


class HostLeaving(Struct, frozen=True, tag=True):
    """A host wants to leave. Its workers get no further requests, and its decodes move to other hosts."""

    host: HostId


class DismissHost(Struct, frozen=True, tag=True):
    """No request and no transfer needs the leaving host any more: it may end."""

    host: HostId


class RestartWanted(Struct, frozen=True, tag=True):
    """Restart these workers one after the other. An empty tuple cancels the restart in progress."""

    workers: tuple[WorkerId, ...]


class RestartWorker(Struct, frozen=True, tag=True):
    """End this worker after its step, and start it again under its name. Its loss does not count as a death."""

    worker: WorkerId
