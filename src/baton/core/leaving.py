"""A host that leaves in order: its requests go to other hosts first, with their KV."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import HostId


class HostLeaving(Struct, frozen=True, tag=True):
    """A host wants to leave. Its workers get no further requests, and its decodes move to other hosts."""

    host: HostId


class DismissHost(Struct, frozen=True, tag=True):
    """No request and no transfer needs the leaving host any more: let it go."""

    host: HostId
