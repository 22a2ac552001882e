"""Pods, and an API of Kubernetes that lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from baton.integrations.kubernetes import KubernetesApi
from tests.loop_server import loop_server


def pod(ip: str, role: str | None = None, *, ready: bool = True, leaving: bool = False) -> dict[str, object]:
    labels = {"app": "vllm", **({"llm-d.ai/role": role} if role is not None else {})}
    metadata = {"labels": labels, **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaving else {})}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": metadata, "status": {"podIP": ip, "conditions": conditions}}


@dataclass
class FakeKubernetes:
    """The API. A test changes its fields while it runs."""

    pods: list[dict[str, object]] = field(default_factory=list)
    status: int = 200
    queries: list[str] = field(default_factory=list)

    async def list_pods(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer secret"
        self.queries.append(f"{request.path} {request.query['labelSelector']}")
        return web.json_response({"items": self.pods}, status=self.status)


@asynccontextmanager
async def kubernetes(fake: FakeKubernetes, folder: Path) -> AsyncIterator[KubernetesApi]:
    """Run the API, with the service account of the namespace `llm` in a folder."""
    app = web.Application()
    app.router.add_get("/{path:.*}", fake.list_pods)
    (folder / "token").write_text("secret\n")
    (folder / "namespace").write_text("llm")
    async with loop_server(app) as server:
        yield KubernetesApi(url=f"http://127.0.0.1:{server.port}", account=folder)
