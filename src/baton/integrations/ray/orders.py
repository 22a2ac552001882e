"""Messages between the server and the process that runs Ray's client."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import HostId, WorkerId


class ConnectRay(Struct, frozen=True, kw_only=True, tag=True):
    """The first message: connect to the cluster."""

    address: str
    url: str
    """URL at which hosts join."""
    is_on_all_addresses: bool
    """The server listens on all addresses of this node, so that hosts use the one that Ray knows."""
    join_key: str
    """Empty: hosts join without a key."""
    start_s: float
    """Deadline of the start of a host that scaling has added, in seconds."""
    leave_s: float
    """A host that leaves is killed after this long, in seconds."""


class LaunchedHost(Struct, frozen=True, kw_only=True):
    """A host that has to run."""

    name: HostId
    added_worker: WorkerId = WorkerId("")
    """The worker for which scaling has added this host. Empty: it is one of the configured hosts."""


class StartHosts(Struct, frozen=True, kw_only=True, tag=True):
    """Reserve one placement group, and run a host in each of its bundles."""

    title: str
    hosts: tuple[LaunchedHost, ...]
    arguments: tuple[str, ...]
    """Of `baton host`, without its name and the server."""
    resources: dict[str, float]
    """Resources of one host, by Ray's names."""
    cores: int
    """Cores to which a host is pinned. 0: it is not pinned."""


class RetireHost(Struct, frozen=True, tag=True):
    """Do not start this host again. It leaves by itself."""

    host: HostId


class EndHosts(Struct, frozen=True, tag=True):
    """End all hosts, then this process."""


class RayConnected(Struct, frozen=True, tag=True):
    """The client has connected."""

    problem: str = ""
    """A problem that may keep hosts from joining. Empty: none was found."""


class RayRefused(Struct, frozen=True, tag=True):
    """The client cannot connect to a cluster."""

    reason: str


class HostGivenUp(Struct, frozen=True, tag=True):
    """A host that scaling has added does not start, and will not be tried again."""

    host: HostId
    reason: str


ToRay = ConnectRay | StartHosts | RetireHost | EndHosts
FromRay = RayConnected | RayRefused | HostGivenUp
