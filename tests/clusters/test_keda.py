"""KEDA's external push scaler: the targets of a server, and the answers that a real gRPC client gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from baton.integrations.keda import scaler as keda
from baton.integrations.keda.scaler import (
    SERVICE,
    CallRefusedError,
    Targets,
    message_classes,
    serve_scaler,
    workers_per_pod,
)
from tests.clusters.cached_packages import grpc_folder
from tests.command_line import baton
from tests.serving import RunningServer, serving

PREFILL = {"role": "prefill"}
WAIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _grpc() -> None:
    sys.path.append(str(grpc_folder()))


@dataclass
class Asked:
    """A running scaler and a client's channel to it."""

    targets: Targets
    channel: Any
    messages: dict[str, Any]

    def open(self, method: str, answer: str, metadata: Mapping[str, str], *, stream: bool = False) -> Any:
        """Begin a call about an object with this metadata."""
        made = self.channel.unary_stream if stream else self.channel.unary_unary
        call = made(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.messages[answer].FromString,
        )
        asked = self.messages["ScaledObjectRef"](name="baton", namespace="llm", scalerMetadata=metadata)
        if method == "GetMetrics":
            asked = self.messages["GetMetricsRequest"](scaledObjectRef=asked)
        return call(asked, timeout=WAIT_S)

    async def value(self, metadata: Mapping[str, str]) -> Any:
        return (await self.open("GetMetrics", "GetMetricsResponse", metadata)).metricValues[0]

    async def is_active(self, metadata: Mapping[str, str]) -> bool:
        return (await self.open("IsActive", "IsActiveResponse", metadata)).result


@asynccontextmanager
async def scaling(folder: Path) -> AsyncIterator[Asked]:
    targets, listens, address = Targets(), asyncio.Event(), f"unix:{folder}/scaler"
    task = asyncio.create_task(serve_scaler(address, targets, listens.set))
    waiting = asyncio.create_task(listens.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        async with import_module("grpc.aio").insecure_channel(address) as channel:
            yield Asked(targets, channel, message_classes())
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def play(folder: Path, script: Callable[[Asked], Awaitable[None]]) -> None:
    async def run() -> None:
        async with scaling(folder) as asked:
            await script(asked)

    asyncio.run(run())


def known(**by_role: int) -> Targets:
    targets = Targets()
    targets.update(by_role)
    return targets


def test_the_metric_is_the_number_of_workers_and_its_target_those_of_a_pod(tmp_path: Path) -> None:
    """So the autoscaler asks for as many pods as the policy asks for workers, divided by the workers of a pod."""

    async def script(asked: Asked) -> None:
        asked.targets.update({"prefill": 3})
        value = await asked.value(PREFILL)
        assert (value.metricName, value.metricValue, value.metricValueFloat) == ("baton-workers-prefill", 3, 3.0)
        answer = await asked.open("GetMetricSpec", "GetMetricSpecResponse", {**PREFILL, "workers": "2"})
        spec = answer.metricSpecs[0]
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("baton-workers-prefill", 2, 2.0)

    play(tmp_path, script)


def test_a_role_is_active_unless_its_target_is_zero(tmp_path: Path) -> None:
    """A server without hosts runs no policy: without this, a fleet at zero could never start again."""

    async def script(asked: Asked) -> None:
        for by_role, active in (({"prefill": 1}, True), ({}, True), ({"prefill": 0}, False)):
            asked.targets.update(by_role)
            assert await asked.is_active(PREFILL) is active

    play(tmp_path, script)


@pytest.mark.parametrize(
    ("by_role", "metadata", "code", "said"),
    [
        ({"decode": 1}, PREFILL, "FAILED_PRECONDITION", "the scaling policy has no target for prefill: configure"),
        ({}, {"role": "router"}, "INVALID_ARGUMENT", "metadata.role is 'router': write "),
        ({}, {}, "INVALID_ARGUMENT", "metadata.role is ''"),
        ({}, {"role": "50 % für alle\n"}, "INVALID_ARGUMENT", "metadata.role is '50 % für alle\\n'"),
        (None, PREFILL, "UNAVAILABLE", "the server was not asked yet"),
    ],
)
def test_a_call_without_an_answer_says_why(
    tmp_path: Path, by_role: dict[str, int] | None, metadata: Mapping[str, str], code: str, said: str
) -> None:
    async def script(asked: Asked) -> None:
        if by_role is not None:
            asked.targets.update(by_role)
        with pytest.raises(import_module("grpc").RpcError) as raised:
            await asked.value(metadata)
        assert raised.value.code().name == code
        assert said in raised.value.details()

    play(tmp_path, script)


def test_a_reason_of_many_bytes_arrives(tmp_path: Path) -> None:
    """A header of more than 126 bytes has a size of several bytes."""
    reasons = ["a" * size for size in (126, 127, 128, 254, 255, 300, 500)]

    async def script(asked: Asked) -> None:
        for asked.targets.problem in reasons:
            with pytest.raises(import_module("grpc").RpcError) as raised:
                await asked.value(PREFILL)
            assert raised.value.details() == asked.targets.problem

    play(tmp_path, script)


@pytest.mark.parametrize("text", ["0", "257", "-1", "two", "\u0662", "", "1" * 5000])
def test_a_wrong_number_of_workers_is_refused(text: str) -> None:
    with pytest.raises(CallRefusedError, match=r"metadata\.workers"):
        workers_per_pod({"workers": text})


def test_a_change_is_pushed_at_once(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        asked.targets.update({})
        stream = asked.open("StreamIsActive", "IsActiveResponse", PREFILL, stream=True)
        said = [(await stream.read()).result]
        for target in (0, 0, 2):
            asked.targets.update({"prefill": target})
            if target != 0 or said[-1]:
                said.append((await stream.read()).result)
        assert said == [True, False, True]
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream.read()
        while asked.targets.watches:  # the server may read the end of the stream after another request
            await asked.is_active(PREFILL)

    play(tmp_path, script)


def test_a_push_waits_for_a_server_that_answers(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        stream = asked.open("StreamIsActive", "IsActiveResponse", PREFILL, stream=True)
        with pytest.raises(import_module("grpc").RpcError, match="the server was not asked yet"):
            await asked.is_active(PREFILL)
        asked.targets.update({"prefill": 0})
        assert not (await stream.read()).result
        wrong = asked.open("StreamIsActive", "IsActiveResponse", {"role": "router"}, stream=True)
        with pytest.raises(import_module("grpc").RpcError, match=r"metadata\.role"):
            await wrong.read()

    play(tmp_path, script)


def test_the_last_answer_of_a_server_counts_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = known(prefill=2)
    targets.problem = "it does not answer"
    assert targets.of(PREFILL) == 2
    moment_s = keda.now_s() + 16
    monkeypatch.setattr(keda, "now_s", lambda: moment_s)
    with pytest.raises(CallRefusedError, match="it does not answer"):
        targets.of(PREFILL)


def test_a_missing_extra_and_an_open_port_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    done = baton("keda", "--host", "0.0.0.0")
    assert (done.returncode, "allow that with --insecure" in done.stderr) == (2, True)
    monkeypatch.setitem(sys.modules, "hpack", None)
    done = baton("keda", "--port", "6000")
    assert (done.returncode, "pip install 'baton[keda]'" in done.stderr) == (2, True)


# ---- a real client

CONFIG = """
tick_s = 0.05
[policy.scaling]
use = "forecast-scaling"
options = { idle_s = 1.0, calm_s = 0.0 }
"""
CLIENT = """
import json, sys
import grpc
from baton.integrations.keda.scaler import message_classes
from baton.integrations.keda.scaler import SERVICE

messages = message_classes()
channel = grpc.insecure_channel(sys.argv[1])

def call(method, request, answer, stream=False):
    made = channel.unary_stream if stream else channel.unary_unary
    parse = messages[answer].FromString
    return made(f"/{SERVICE}/{method}", request_serializer=lambda each: each.SerializeToString(),
                response_deserializer=parse)(request, timeout=60, wait_for_ready=True)

def reference(**metadata):
    return messages["ScaledObjectRef"](name="baton-prefill", namespace="llm", scalerMetadata=metadata)

asked = reference(role="prefill")
pushed = []
for answer in call("StreamIsActive", asked, "IsActiveResponse", stream=True):
    pushed.append(answer.result)
    if not answer.result:
        break
spec = call("GetMetricSpec", asked, "GetMetricSpecResponse").metricSpecs[0]
request = messages["GetMetricsRequest"](scaledObjectRef=asked, metricName=spec.metricName)
value = call("GetMetrics", request, "GetMetricsResponse").metricValues[0]
try:
    call("IsActive", reference(role="router"), "IsActiveResponse")
    refused = ""
except grpc.RpcError as error:
    refused = error.code().name
print(json.dumps({"pushed": pushed, "spec": [spec.metricName, spec.targetSizeFloat, spec.targetSize],
                  "value": [value.metricName, value.metricValueFloat], "refused": refused,
                  "active": call("IsActive", asked, "IsActiveResponse").result}))
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return the variables with which the client finds gRPC, and Baton `hpack`."""
    return {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(grpc_folder())])}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = tmp_path_factory.mktemp("keda") / "baton.toml"
    config.write_text(CONFIG)
    arguments = ("--launcher", "external", "--prefill", "1", "--decode", "1", "--config", str(config))
    with serving("hash", *arguments) as running:
        yield running


@pytest.mark.deep
def test_a_grpc_client_sees_the_targets_of_an_idle_server(server: RunningServer, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "baton.cli.main", "keda", "--url", server.url, "--port", port]
    scaling = subprocess.Popen(command, env=os.environ | environment)
    try:
        asking = [sys.executable, "-c", CLIENT, f"127.0.0.1:{port}"]
        done = subprocess.run(asking, env=os.environ | environment, capture_output=True, text=True, check=False)
    finally:
        scaling.terminate()
        assert scaling.wait(30) == 0
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["pushed"][-1] is False
    assert found["spec"] == ["baton-workers-prefill", 1.0, 1]
    assert found["value"] == ["baton-workers-prefill", 0.0]
    assert (found["active"], found["refused"]) == (False, "INVALID_ARGUMENT")
    state = server.cluster()
    assert state["targets"] == {"prefill": 0, "decode": 0}
    assert len(state["workers"]) == 2, "the server itself ends no worker"
