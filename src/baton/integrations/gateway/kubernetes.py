"""The servers of an InferencePool, read from the API of the Kubernetes cluster in which the picker runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.types import Role
from baton.integrations.engines.port import EngineBrokenError
from baton.integrations.kubernetes import KubernetesApi


class _Port(Struct, frozen=True):
    number: int


class _Selector(Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str]


class _PoolSpec(Struct, frozen=True, rename="camel"):
    selector: _Selector
    target_ports: list[_Port]


class _PoolObject(Struct, frozen=True):
    spec: _PoolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePool:
    """A pool of pods. Implements `PoolSource`. Ready pods belong to it until they are deleted."""

    api: KubernetesApi
    namespace: str
    name: str

    @staticmethod
    def of(text: str, api: KubernetesApi) -> InferencePool:
        """Return the pool `NAMESPACE/NAME`. Raises ConfigError outside of a cluster, and for another form."""
        namespace, mark, name = text.partition("/")
        if not mark or not namespace or not name or "/" in name:
            raise ConfigError(f"--pool is {text!r}: write NAMESPACE/NAME of an InferencePool")
        if not api.is_reachable:
            raise ConfigError("--pool needs a pod with a service account; elsewhere, give --engine-url for each server")
        return InferencePool(api=api, namespace=namespace, name=name)

    async def members(self) -> Mapping[str, Role]:
        """Return the role of each ready pod by its address. Raises EngineBrokenError if the API does not answer."""
        name, namespace = quote(self.name, safe=""), quote(self.namespace, safe="")
        try:
            path = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/{name}"
            spec = (await self.api.read(path, _PoolObject)).spec
            labels = ",".join(f"{key}={value}" for key, value in spec.selector.match_labels.items())
            pods = await self.api.ready_pods(self.namespace, labels)
        except EngineBrokenError as error:
            raise EngineBrokenError(f"the servers of the InferencePool {self.name} are not known: {error}") from error
        return {f"{pod.host}:{port.number}": pod.role for pod in pods for port in spec.target_ports}
