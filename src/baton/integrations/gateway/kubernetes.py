"""The servers of an InferencePool, read from the API of the Kubernetes cluster in which the picker runs."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.types import Role
from baton.integrations.engines.port import EngineBrokenError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc"
ROLE_LABEL = "llm-d.ai/role"
ROLES: Mapping[str, Role] = {
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "encode-decode": "decode",
}
"""Roles by the values of llm-d's label. Pods with another value, or without the label, do both phases."""
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


class _Port(Struct, frozen=True):
    number: int


class _Selector(Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str]


class _PoolSpec(Struct, frozen=True, rename="camel"):
    selector: _Selector
    target_ports: list[_Port]


class _PoolObject(Struct, frozen=True):
    spec: _PoolSpec


class _Metadata(Struct, frozen=True, rename="camel"):
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None


class _Condition(Struct, frozen=True):
    type: str
    status: str


class _PodStatus(Struct, frozen=True, rename={"pod_ip": "podIP"}):
    pod_ip: str = ""
    conditions: list[_Condition] = []


class _Pod(Struct, frozen=True):
    metadata: _Metadata
    status: _PodStatus = _PodStatus()

    @property
    def is_ready(self) -> bool:
        is_ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)
        return is_ready and bool(self.status.pod_ip) and self.metadata.deletion_timestamp is None


class _Pods(Struct, frozen=True):
    items: list[_Pod]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePool:
    """A pool of pods. Implements `PoolSource`. Ready pods belong to it until they are deleted."""

    api: str
    """URL of the API server."""
    account: Path
    """Folder of the service account."""
    namespace: str
    name: str

    @staticmethod
    def of(text: str, account: Path = ACCOUNT) -> InferencePool:
        """Return the pool `NAMESPACE/NAME`. Raises ConfigError outside of a cluster, and for another form."""
        namespace, mark, name = text.partition("/")
        if not mark or not namespace or not name or "/" in name:
            raise ConfigError(f"--pool is {text!r}: write NAMESPACE/NAME of an InferencePool")
        if not (account / "token").is_file():
            raise ConfigError("--pool needs a pod with a service account; elsewhere, give --engine-url for each server")
        return InferencePool(api=API, account=account, namespace=namespace, name=name)

    async def members(self) -> Mapping[str, Role]:
        """Return the role of each ready pod by its address. Raises EngineBrokenError if the API does not answer."""
        name, namespace = quote(self.name, safe=""), quote(self.namespace, safe="")
        pool = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/{name}"
        try:
            headers = {"authorization": f"Bearer {(self.account / 'token').read_text().strip()}"}
            async with aiohttp.ClientSession(self.api, timeout=_TIMEOUT, headers=headers) as session:
                spec = msgspec.json.decode(await self._get(session, pool), type=_PoolObject).spec
                labels = ",".join(f"{key}={value}" for key, value in spec.selector.match_labels.items())
                query = urlencode({"labelSelector": labels, "resourceVersion": "0"})
                listed = await self._get(session, f"/api/v1/namespaces/{namespace}/pods?{query}")
                pods = msgspec.json.decode(listed, type=_Pods).items
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise EngineBrokenError(f"the servers of the InferencePool {self.name} are not known: {said}") from error
        return {
            f"{_in_url(pod.status.pod_ip)}:{port.number}": ROLES.get(pod.metadata.labels.get(ROLE_LABEL, ""), "mixed")
            for pod in pods
            if pod.is_ready
            for port in spec.target_ports
        }

    async def _get(self, session: aiohttp.ClientSession, path: str) -> bytes:
        authority = self.account / "ca.crt"
        tls = ssl.create_default_context(cafile=authority) if self.api.startswith("https:") else True
        async with session.get(path, ssl=tls) as response:
            body = await response.read()
            if response.status != 200:
                raise OSError(
                    f"{path.partition('?')[0]} answered {response.status}: {body[:200].decode(errors='replace')}"
                )
            return body


def _in_url(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
