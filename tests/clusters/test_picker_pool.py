"""The servers of an endpoint picker: found, checked and lost, with servers and a Kubernetes API that ship as fakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from baton.core.config import Config
from baton.core.types import Role
from baton.integrations.engines.port import EngineBrokenError
from baton.integrations.gateway.build import build_picker
from baton.integrations.gateway.kubernetes import InferencePool
from baton.integrations.gateway.picker import Picker
from baton.integrations.gateway.pool import FixedPool, Pool
from baton.integrations.kubernetes import KubernetesApi
from tests.clusters.picker_changes import Changes
from tests.kubernetes_pods import pod
from tests.loop_server import LoopServer, loop_server

SGLANG = 'sglang:num_running_reqs{model_name="m"} 5.0\nsglang:num_queue_reqs{model_name="m"} 2.0\n'
BATON = (
    'baton_requests_running{worker="a",role="mixed"} 3.0\nbaton_requests_running{worker="b",role="mixed"} 2.0\n'
    'baton_requests_waiting{worker="a",role="mixed"} 2.0\n'
)
VLLM = 'vllm:num_requests_running{model_name="m"} 5.0\nvllm:num_requests_waiting{model_name="m"} 2.0\n'


@dataclass
class Engine:
    """A server with a health and metrics."""

    health: int = 200
    metrics: str = "process_start_time_seconds 1.0\n"
    server: LoopServer | None = None

    @property
    def address(self) -> str:
        assert self.server is not None
        return f"127.0.0.1:{self.server.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self.server = LoopServer(app)
        await self.server.start()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)


@dataclass
class Changing:
    """A pool whose servers a test changes."""

    roles: dict[str, Role] = field(default_factory=dict)

    async def members(self) -> Mapping[str, Role]:
        return dict(self.roles)


@dataclass(frozen=True)
class Followed:
    """A pool with one server, which a picker follows."""

    engine: Engine
    source: Changing
    picker: Picker
    pool: Pool
    said: list[str]
    changes: Changes


def play(script: Callable[[Followed], Awaitable[None]]) -> None:
    """Run a script while a pool follows one server."""

    async def run() -> None:
        engine = Engine()
        await engine.start()
        source, picker, said = Changing({engine.address: "mixed"}), build_picker(Config()), list[str]()
        changes, pool = Changes(picker), Pool(source, picker, said.append, check_s=0.01)
        task = asyncio.create_task(pool.run())
        try:
            await script(Followed(engine, source, picker, pool, said, changes))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert engine.server is not None
            await engine.server.stop()
        assert not picker.endpoints

    asyncio.run(run())


def test_a_server_takes_requests_while_it_is_healthy() -> None:
    async def script(given: Followed) -> None:
        engine, picker, until = given.engine, given.picker, given.changes.until
        await until(lambda: engine.address in picker.endpoints)
        engine.health = 503
        await until(lambda: not picker.endpoints)
        assert given.said[-1] == f"{engine.address} takes no requests: /health answered 503"

    play(script)


def test_a_server_whose_process_has_ended_is_lost_at_the_next_check() -> None:
    async def script(given: Followed) -> None:
        engine, picker, until = given.engine, given.picker, given.changes.until
        await until(lambda: engine.address in picker.endpoints)
        assert engine.server is not None
        await engine.server.stop()
        await until(lambda: not picker.endpoints)
        assert "no process listens there" in given.said[-1]

    play(script)


def test_a_restarted_server_begins_with_an_empty_cache() -> None:
    async def script(given: Followed) -> None:
        engine, picker, until = given.engine, given.picker, given.changes.until
        await until(lambda: engine.address in picker.endpoints)
        before = picker.endpoints[engine.address]
        engine.metrics = "process_start_time_seconds 2.0\n"
        await until(lambda: picker.endpoints.get(engine.address, before) is not before)
        assert any("it was restarted" in line for line in given.said)

    play(script)


@pytest.mark.parametrize("metrics", [SGLANG, BATON, VLLM, BATON + VLLM])
def test_the_load_of_a_server_is_read_by_its_names(metrics: str) -> None:
    async def script(given: Followed) -> None:
        engine, picker, until = given.engine, given.picker, given.changes.until
        engine.metrics += metrics
        await until(lambda: engine.address in picker.endpoints)
        await until(lambda: picker.endpoints[engine.address].load.running_requests == 5)
        assert picker.endpoints[engine.address].load.waiting_requests == 2

    play(script)


def test_servers_follow_their_source() -> None:
    """A server that has another role is another one."""

    async def script(given: Followed) -> None:
        engine, picker, until = given.engine, given.picker, given.changes.until
        await until(lambda: engine.address in picker.endpoints)
        given.source.roles[engine.address] = "decode"
        await until(lambda: engine.address in picker.endpoints and picker.endpoints[engine.address].role == "decode")
        given.source.roles.clear()
        await until(lambda: not picker.endpoints)

    play(script)


def test_a_fixed_pool_is_what_was_configured() -> None:
    assert asyncio.run(FixedPool({"10.0.0.1:80": "mixed"}).members()) == {"10.0.0.1:80": "mixed"}


# ---- Kubernetes

POOL = {"spec": {"selector": {"matchLabels": {"app": "vllm", "tier": "a"}}, "targetPorts": [{"number": 8000}]}}


PODS = [
    pod("10.0.0.1"), pod("10.0.0.2", "prefill"), pod("10.0.0.3", "decode"), pod("10.0.0.4", "prefill-decode"),
    pod("fd00::5"), pod("10.0.0.6", ready=False), pod("10.0.0.7", leaving=True), pod(""),
]  # fmt: skip


async def asked_pool(folder: Path, answer: Callable[[web.Request], web.Response]) -> Mapping[str, Role]:
    async def handle(request: web.Request) -> web.Response:
        return answer(request)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    (folder / "token").write_text("secret\n")
    async with loop_server(app) as server:
        api = KubernetesApi(url=f"http://127.0.0.1:{server.port}", account=folder)
        return await InferencePool(api=api, namespace="llm", name="pool").members()


def test_the_ready_pods_of_an_inference_pool_are_its_servers(tmp_path: Path) -> None:
    def answer(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer secret"
        if request.path == "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools/pool":
            return web.json_response(POOL)
        assert request.path == "/api/v1/namespaces/llm/pods"
        assert request.query["labelSelector"] == "app=vllm,tier=a"
        return web.json_response({"items": PODS})

    assert asyncio.run(asked_pool(tmp_path, answer)) == {
        "10.0.0.1:8000": "mixed",
        "10.0.0.2:8000": "prefill",
        "10.0.0.3:8000": "decode",
        "10.0.0.4:8000": "mixed",
        "[fd00::5]:8000": "mixed",
    }


@pytest.mark.parametrize("body", [json.dumps({"kind": "Status"}), "no json"])
@pytest.mark.parametrize("status", [200, 403])
def test_an_api_without_an_answer_says_so(tmp_path: Path, status: int, body: str) -> None:
    with pytest.raises(EngineBrokenError, match="the servers of the InferencePool pool are not known"):
        asyncio.run(asked_pool(tmp_path, lambda request: web.Response(status=status, text=body)))
