"""Hosts that leave and workers that restart in order: their requests go elsewhere first, with their KV."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import HostId, WorkerId


class HostLeaving(Struct, frozen=True, tag=True):
    """A host wants to leave. Its workers get no further requests, and its decodes move to other hosts."""

    host: HostId


class DismissHost(Struct, frozen=True, tag=True):
    """No request and no transfer needs the leaving host any more: let it go."""

    host: HostId


class RestartWanted(Struct, frozen=True, tag=True):
    """An administrator wants these workers to restart one after the other. None: the restart is called off."""

    workers: tuple[WorkerId, ...]


class RestartWorker(Struct, frozen=True, tag=True):
    """End this worker after its step, and start it again under its name. Its loss does not count as a death."""

    worker: WorkerId
