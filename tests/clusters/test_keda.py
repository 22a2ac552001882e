"""KEDA's external push scaler: the targets of a server, and the answers that a real gRPC client gets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from baton.integrations.keda import scaler as keda
from baton.integrations.keda.scaler import CallRefusedError, Scaler, Targets, workers_per_pod
from tests.clusters.cached_packages import grpc_folder
from tests.command_line import baton
from tests.serving import RunningServer, serving

CODES = {name: name for name in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAVAILABLE")}
PREFILL = {"role": "prefill"}


class AbortedError(Exception):
    pass


class Context:
    async def abort(self, code: object, details: str) -> None:
        raise AbortedError(f"{code}: {details}")


def scaler(targets: Targets) -> Scaler:
    return Scaler(targets, CODES)


def known(**by_role: int) -> Targets:
    targets = Targets()
    targets.update(by_role)
    return targets


def test_the_metric_is_the_number_of_workers_and_its_target_those_of_a_pod() -> None:
    """So the autoscaler asks for as many pods as the policy asks for workers, divided by the workers of a pod."""
    served = scaler(known(prefill=3))
    value = asyncio.run(served.metric_value(PREFILL, Context()))
    assert (value.name, value.value) == ("baton-workers-prefill", 3.0)
    spec = asyncio.run(served.metric_spec({**PREFILL, "workers": "2"}, Context()))
    assert (spec.name, spec.value) == ("baton-workers-prefill", 2.0)


def test_a_role_is_active_unless_its_target_is_zero() -> None:
    """A server without hosts runs no policy: without this, a fleet at zero could never start again."""
    assert asyncio.run(scaler(known(prefill=1)).is_active(PREFILL, Context()))
    assert asyncio.run(scaler(known()).is_active(PREFILL, Context()))
    assert not asyncio.run(scaler(known(prefill=0)).is_active(PREFILL, Context()))


@pytest.mark.parametrize(
    ("by_role", "metadata", "said"),
    [
        ({"decode": 1}, PREFILL, "FAILED_PRECONDITION: the scaling policy has no target for prefill"),
        ({}, {"role": "router"}, "INVALID_ARGUMENT: metadata.role is 'router'"),
        ({}, {}, "INVALID_ARGUMENT: metadata.role is ''"),
        (None, PREFILL, "UNAVAILABLE: the server was not asked yet"),
    ],
)
def test_a_call_without_an_answer_says_why(
    by_role: dict[str, int] | None, metadata: Mapping[str, str], said: str
) -> None:
    targets = Targets() if by_role is None else known(**by_role)
    with pytest.raises(AbortedError, match=said):
        asyncio.run(scaler(targets).metric_value(metadata, Context()))


@pytest.mark.parametrize("text", ["0", "257", "-1", "two", "\u0662", ""])
def test_a_wrong_number_of_workers_is_refused(text: str) -> None:
    with pytest.raises(CallRefusedError, match=r"metadata\.workers"):
        workers_per_pod({"workers": text})


def test_a_change_is_pushed_at_once() -> None:
    async def play() -> list[bool]:
        targets, said = Targets(), list[bool]()
        stream = scaler(targets).stream_is_active(PREFILL, Context())
        for by_role in ({}, {"prefill": 0}, {"prefill": 2}):
            waiting = asyncio.ensure_future(anext(stream))
            targets.update(by_role)
            said.append(await asyncio.wait_for(waiting, 10))
        return said

    assert asyncio.run(play()) == [True, False, True]


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
    monkeypatch.setitem(sys.modules, "grpc", None)
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
    """Return the variables with which Baton finds gRPC."""
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
