"""The example of a server class for Ray Serve, with a real Baton server: calls as Ray's ingress makes them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ConfigDict

from tests.serving import NO_TLS, nothing_used

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "the quick brown fox jumps over the lazy dog. " * 8
POLLS_MAX = 3000


class Request(BaseModel):
    model_config = ConfigDict(extra="allow")


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (ROOT / "examples" / "ray_serve", ROOT / "tests" / "clusters" / "fake_ray"):
        monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def config(**engine: object) -> Any:
    model = SimpleNamespace(model_id="served", model_source="hash")
    return SimpleNamespace(model_loading_config=model, engine_kwargs=engine, deployment_config={"num_replicas": 2})


@asynccontextmanager
async def replica(**engine: object) -> AsyncIterator[Any]:
    from baton_server import BatonServer

    server = BatonServer.__new__(BatonServer)
    try:
        await server.__init__(config(**engine))  # Ray Serve allows a constructor that waits
        yield server
    finally:
        await server.stop()


def play(script: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with replica(arguments=["--mixed", "1"]) as server:
            await script(server)

    asyncio.run(run())


def request(**fields: object) -> Request:
    return Request(**{"model": "served", "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields})


async def only(answers: AsyncGenerator[Any, None]) -> Any:
    (answer,) = [each async for each in answers]
    return answer


def test_responses_streams_and_errors_are_those_that_ray_expects() -> None:
    async def script(server: Any) -> None:
        await server.check_health()
        whole = await only(await server.completions(request(prompt=PROMPT)))
        batches = [each async for each in await server.completions(request(prompt=PROMPT, stream=True))]
        events = [event for batch in batches for event in batch]
        assert events[-1] == "data: [DONE]\n\n"
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1]]
        assert "".join(texts) == whole.choices[0].text
        assert (whole.model, whole.usage.completion_tokens) == ("served", 12)
        chat = await only(await server.chat(request(messages=[{"role": "user", "content": "hello"}])))
        assert chat.choices[0].message.content
        asked = SimpleNamespace(headers={"X-Request-Id": "named", "authorization": "Bearer of Ray"})
        assert (await only(await server.completions(request(prompt=PROMPT), asked))).id.endswith("named")
        refused = await only(await server.chat(request(messages=[], max_tokens=-1, stream=True)))
        assert refused.error.code == 400
        with pytest.raises(NotImplementedError, match="cache_salt"):
            await server.reset_prefix_cache()

    play(script)


def test_a_cancelled_stream_is_aborted_and_a_dead_server_is_told() -> None:
    async def script(server: Any) -> None:
        answers = await server.completions(request(prompt=PROMPT, stream=True, max_tokens=3000))
        await anext(answers)
        await answers.aclose()
        async with httpx.AsyncClient(base_url=server._url, verify=NO_TLS) as client:
            for _ in range(POLLS_MAX):
                state = (await client.get("/cluster")).json()
                if nothing_used(state) and not any(worker["running"] for worker in state["workers"]):
                    break
                await asyncio.sleep(0.02)
            assert nothing_used(state)
        server._process.kill()
        await server._process.wait()
        with pytest.raises(RuntimeError, match="ended with code -9"):
            await server.check_health()

    play(script)


def test_a_server_that_runs_is_used_by_its_url() -> None:
    async def script(server: Any) -> None:
        async with replica(url=server._url) as other:
            await other.check_health()
            assert (await only(await other.completions(request(prompt=PROMPT)))).choices[0].text

    play(script)


def test_a_server_that_does_not_start_is_told() -> None:
    async def run() -> None:
        async with replica(arguments=["--no-such-flag"]):
            pass

    with pytest.raises(RuntimeError, match="baton serve ended with code 2"):
        asyncio.run(run())


def test_a_replica_has_a_cpu_unless_the_configuration_names_its_resources() -> None:
    from baton_server import BatonServer

    given = config()
    assert BatonServer.get_deployment_options(given) == {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}}
    given.deployment_config = {"ray_actor_options": {"num_cpus": 4, "num_gpus": 1}}
    assert BatonServer.get_deployment_options(given) == given.deployment_config
