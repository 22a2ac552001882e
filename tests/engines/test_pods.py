"""Servers that Baton finds in Kubernetes by the labels of their pods. The API and the servers are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.core.engine_config import EngineConfig, EnginePodsConfig, EnginesConfig
from baton.core.errors import ConfigError
from baton.integrations.engines.pods import EnginePods
from baton.integrations.kubernetes import KubernetesApi
from tests.engines.fake_engine import answer_to
from tests.engines.fake_vllm import FakeVllm
from tests.engines.fleets import Baton, baton_over, finished, tokens_of
from tests.kubernetes_pods import FakeKubernetes, kubernetes, pod

PROMPT = [100 + token % 90 for token in range(40)]
FIRST, SECOND = "127.0.0.1", "127.0.0.2"
"""Addresses of pods, whose servers have the same port."""


@asynccontextmanager
async def found(
    api: FakeKubernetes, folder: Path, *, joins: int, **fields: int
) -> AsyncIterator[tuple[Baton, list[FakeVllm]]]:
    """Run two servers, and Baton, which knows only the labels of their pods. It serves once `joins` have joined."""
    fakes = [FakeVllm(name="a", host=FIRST, **fields), FakeVllm(name="b", host=SECOND, **fields)]
    await fakes[0].start()
    await fakes[1].start(int(urlsplit(fakes[0].url).port or 0))
    config = EnginePodsConfig(selector="app=vllm", port=int(urlsplit(fakes[0].url).port or 0))
    for fake in fakes:
        fake.peers = {other.name: other for other in fakes}
    try:
        async with (
            kubernetes(api, folder) as reached,
            baton_over(pods=EnginePods.of(config, reached), joins=0) as baton,
        ):
            await baton.joined(joins)
            baton.parts.gateway.state = "ready"
            yield baton, fakes
    finally:
        for fake in fakes:
            await fake.close()


def test_servers_join_and_leave_with_their_pods(tmp_path: Path) -> None:
    """The requests of a pod that is deleted continue on another one. A later pod takes the free number."""

    async def run() -> None:
        api = FakeKubernetes([pod(FIRST), pod(SECOND, ready=False)])
        async with found(api, tmp_path, joins=1, free_tokens=5) as (baton, fakes):
            live = baton.submit(PROMPT, 30)
            await tokens_of(live, 5)
            api.pods = [pod(FIRST), pod(SECOND)]
            await baton.joined(2)
            assert set(baton.parts.driver.links) == {"vllm-0", "vllm-1"}
            fakes[1].gate.set()
            api.pods = [pod(FIRST, leaving=True), pod(SECOND)]
            assert (await finished(live)).outcome == "finished"
            assert live.tokens[len(PROMPT) :] == answer_to(PROMPT, 30)
            assert set(baton.parts.driver.links) == {"vllm-1"}
            fakes[0].gate.set()
            api.pods = [pod(FIRST), pod(SECOND)]
            await baton.joined(2)
            assert set(baton.parts.driver.links) == {"vllm-0", "vllm-1"}
            baton.check()
        assert set(api.queries) == {"/api/v1/namespaces/llm/pods app=vllm"}

    asyncio.run(run())


def test_a_label_gives_a_server_its_role(tmp_path: Path) -> None:
    async def run() -> None:
        api = FakeKubernetes([pod(FIRST, "prefill"), pod(SECOND, "decode")])
        async with found(api, tmp_path, joins=2) as (baton, fakes):
            assert await baton.ask(PROMPT, 12) == answer_to(PROMPT, 12)
            assert fakes[1].loaded_tokens == len(PROMPT) - 1
            baton.check()

    asyncio.run(run())


def test_servers_stay_while_kubernetes_does_not_answer(tmp_path: Path) -> None:
    async def run() -> None:
        api = FakeKubernetes([pod(FIRST)])
        async with found(api, tmp_path, joins=1) as (baton, _):
            api.status = 403
            await baton.said("the pods with app=vllm are not known: /api/v1/namespaces/llm/pods answered 403")
            assert await baton.ask(PROMPT, 12) == answer_to(PROMPT, 12)

    asyncio.run(run())


def test_the_servers_have_addresses_for_their_kv_events(tmp_path: Path) -> None:
    async def run() -> None:
        api = FakeKubernetes([pod("fd00::5"), pod("10.0.0.1", "decode"), pod("10.0.0.2", ready=False)])
        config = EnginePodsConfig(selector="app=vllm", port=80, kv_events_port=5557, kv_events_replay_port=5558)
        async with kubernetes(api, tmp_path) as reached:
            listed = await EnginePods.of(config, reached).servers()
        assert listed == [
            EngineConfig(
                url="http://10.0.0.1:80",
                role="decode",
                kv_events="tcp://10.0.0.1:5557",
                kv_events_replay="tcp://10.0.0.1:5558",
            ),
            EngineConfig(
                url="http://[fd00::5]:80", kv_events="tcp://[fd00::5]:5557", kv_events_replay="tcp://[fd00::5]:5558"
            ),
        ]
        assert not EnginesConfig(servers=tuple(listed[1:])).problems()

    asyncio.run(run())


def test_outside_of_a_cluster_the_servers_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --engine-url"):
        EnginePods.of(EnginePodsConfig(selector="app=vllm"), KubernetesApi(account=tmp_path))


def test_pods_and_named_servers_are_not_mixed() -> None:
    config = EnginesConfig(servers=(EngineConfig(url="http://a:1"),), pods=EnginePodsConfig(selector="app=vllm"))
    assert any("leave out one of them" in problem for problem in config.problems())
