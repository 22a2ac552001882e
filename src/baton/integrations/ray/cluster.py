"""The calls of Ray that Baton uses. Ray is imported when a client connects, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol

from baton.core.errors import BatonError, ConfigError
from baton.integrations.ray.host_actor import HostActor

NAMESPACE = "baton"


class HostEndedError(BatonError):
    """Ray has lost the actor of a host, or cannot start it."""


class _Reference(Protocol):
    def future(self) -> Future[str]: ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """A placement group: a bundle of resources for each of its hosts."""

    group: Any
    resources: Mapping[str, float]
    """Resources of one bundle."""


@dataclass(frozen=True, slots=True)
class HostOfRay:
    """A host that Ray runs, or will run."""

    actor: Any


def check_installed() -> None:
    """Raise ConfigError if the extra is missing."""
    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'baton[ray]'")


def connect(address: str) -> ModuleType:
    """Connect to a running cluster and return the module `ray`. Raises ConfigError if there is none."""
    check_installed()
    ray = import_module("ray")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"no Ray cluster at {address}: {reason}; run `ray start --head` here, or name one in launcher.address"
        ) from error
    return ray


class RayCluster:
    """A connection to a Ray cluster."""

    def __init__(self, address: str) -> None:
        """Connect. Raises ConfigError if there is no cluster at this address."""
        self._ray = connect(address)
        self._strategies = import_module("ray.util.scheduling_strategies")
        self._groups = import_module("ray.util.placement_group")
        self._error: type[Exception] = import_module("ray.exceptions").RayError

    def own_address(self) -> str:
        """Return the address of this node."""
        return import_module("ray.util").get_node_ip_address()

    def addresses(self) -> set[str]:
        """Return the addresses of all nodes."""
        return {node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}

    def reserve(self, title: str, resources: Mapping[str, float], hosts: int) -> Reservation:
        """Reserve a bundle for each host, on different nodes where possible. A bundle is always on one node.

        If a node is lost, Ray places its bundles on others.
        """
        bundles = [dict(resources) for _ in range(hosts)]
        strategy = "SPREAD" if hosts > 1 else "STRICT_PACK"
        return Reservation(self._groups.placement_group(bundles, strategy=strategy, name=title), resources)

    def release(self, reservation: Reservation) -> None:
        """Give the resources back. Actors that use them are killed."""
        self._groups.remove_placement_group(reservation.group)

    def start(
        self,
        reservation: Reservation,
        bundle: int,
        *,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cores: int,
    ) -> HostOfRay:
        """Start a host in a bundle, once Ray has placed it. The arguments are those of `HostActor`."""
        resources = reservation.resources
        own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
        strategy = self._strategies.PlacementGroupSchedulingStrategy(
            placement_group=reservation.group, placement_group_bundle_index=bundle
        )
        actor = self._ray.remote(HostActor).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            memory=resources.get("memory") or None,
            resources=own or None,
            scheduling_strategy=strategy,
            max_restarts=0,
        )
        return HostOfRay(actor.remote(list(arguments), dict(environment), cores))

    async def place_of(self, host: HostOfRay) -> str:
        """Wait until the host has started. Return its machine. Raises HostEndedError."""
        return await self._result(host.actor.place.remote())

    async def end_of(self, host: HostOfRay) -> str:
        """Wait until the host has ended. Return how. Raises HostEndedError if its actor or its node is lost."""
        return await self._result(host.actor.wait.remote())

    def kill(self, host: HostOfRay) -> None:
        """Kill the host and its actor."""
        self._ray.kill(host.actor)

    async def _result(self, reference: _Reference) -> str:
        try:
            return await asyncio.wrap_future(reference.future())
        except self._error as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise HostEndedError(lines[0] if lines else type(error).__name__) from error
