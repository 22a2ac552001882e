"""Pods of servers, read from the API of the Kubernetes cluster in which this process runs."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from msgspec import Struct

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
Body = TypeVar("Body")


class _Metadata(Struct, frozen=True, rename="camel"):
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None


class _Condition(Struct, frozen=True):
    type: str
    status: str


class _PodStatus(Struct, frozen=True, rename={"pod_ip": "podIP"}):
    pod_ip: str = ""
    conditions: list[_Condition] = []


class Pod(Struct, frozen=True):
    metadata: _Metadata
    status: _PodStatus = _PodStatus()

    @property
    def is_ready(self) -> bool:
        is_ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)
        return is_ready and bool(self.status.pod_ip) and self.metadata.deletion_timestamp is None

    @property
    def role(self) -> Role:
        return ROLES.get(self.metadata.labels.get(ROLE_LABEL, ""), "mixed")

    @property
    def host(self) -> str:
        """The pod's address as the host of a URL."""
        ip = self.status.pod_ip
        return f"[{ip}]" if ":" in ip else ip


class _Pods(Struct, frozen=True):
    items: list[Pod]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesApi:
    """The API server, with the rights of the pod's service account."""

    url: str = API
    account: Path = ACCOUNT
    """Folder of the service account."""

    @property
    def is_reachable(self) -> bool:
        """Whether this process runs in a pod with a service account."""
        return (self.account / "token").is_file()

    def namespace(self) -> str:
        """Return the namespace of the pod. Raises OSError outside of a cluster."""
        return (self.account / "namespace").read_text().strip()

    async def read(self, path: str, kind: type[Body]) -> Body:
        """Return the object at a path. Raises EngineBrokenError if the API gives none."""
        try:
            headers = {"authorization": f"Bearer {(self.account / 'token').read_text().strip()}"}
            tls = ssl.create_default_context(cafile=self.account / "ca.crt") if self.url.startswith("https:") else True
            async with (
                aiohttp.ClientSession(self.url, timeout=_TIMEOUT, headers=headers) as session,
                session.get(path, ssl=tls) as response,
            ):
                body = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineBrokenError(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            text = body[:200].decode(errors="replace")
            raise EngineBrokenError(f"{path.partition('?')[0]} answered {response.status}: {text}")
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise EngineBrokenError(f"{path.partition('?')[0]} is not understood: {error}") from error

    async def ready_pods(self, namespace: str, selector: str) -> Sequence[Pod]:
        """Return the ready pods with these labels, by address. Raises EngineBrokenError."""
        query = urlencode({"labelSelector": selector, "resourceVersion": "0"})
        listed = await self.read(f"/api/v1/namespaces/{quote(namespace, safe='')}/pods?{query}", _Pods)
        return sorted((pod for pod in listed.items if pod.is_ready), key=lambda pod: pod.status.pod_ip)
