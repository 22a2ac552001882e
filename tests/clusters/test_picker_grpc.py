"""The endpoint picker's gRPC server, asked by a real client as Envoy's ext_proc filter asks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from baton.core.config import Config
from baton.integrations.engines.port import EngineLoad
from baton.integrations.gateway import exchange
from baton.integrations.gateway.build import build_picker
from baton.integrations.gateway.messages import HEALTH, NOT_SERVING, SERVICE, SERVING, message_classes
from baton.integrations.gateway.picker import Picker
from baton.integrations.gateway.server import Listening, serve_picker
from tests.clusters.cached_packages import grpc_folder
from tests.clusters.picker_changes import Changes

FIRST, SECOND = "127.0.0.1:8001", "127.0.0.1:8002"
BODY = json.dumps({"model": "m", "prompt": "the quick brown fox " * 40, "max_tokens": 4}).encode()
WAIT_S = 60.0
STREAMED, BUFFERED, DUPLEX = 1, 2, 4


@pytest.fixture(scope="module", autouse=True)
def _grpc() -> None:
    sys.path.append(str(grpc_folder()))


@dataclass
class Asked:
    """A running picker and a client's channel to it."""

    picker: Picker
    channel: Any
    messages: dict[str, Any]
    ready: list[bool]

    def open(self) -> Any:
        method = self.channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.messages["ProcessingResponse"].FromString,
        )
        return method(timeout=WAIT_S)

    def message(self, **fields: Any) -> Any:
        return self.messages["ProcessingRequest"](**fields)

    def headers(self, *, mode: int = DUPLEX, last: bool = False, subset: Any = None, **more: str) -> Any:
        given = {":method": "POST", ":path": "/v1/completions", **{key.replace("_", "-"): more[key] for key in more}}
        sent = [{"key": key, "raw_value": value.encode()} for key, value in given.items()]
        made = self.message(request_headers={"headers": {"headers": sent}, "end_of_stream": last})
        made.protocol_config.request_body_mode = made.protocol_config.response_body_mode = mode
        if subset is not None:
            hint = made.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({"x-gateway-destination-endpoint-subset": subset})
        return made

    def body(self, body: bytes, *, last: bool = True, name: str = "request_body") -> Any:
        return self.message(**{name: {"body": body, "end_of_stream": last}})

    def answer_headers(self, kind: str = "application/json", status: str = "200") -> Any:
        sent = [{"key": ":status", "raw_value": status.encode()}, {"key": "content-type", "raw_value": kind.encode()}]
        return self.message(response_headers={"headers": {"headers": sent}})

    async def health(self, service: str) -> int:
        method = self.channel.unary_unary(
            f"/{HEALTH}/Check",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.messages["HealthCheckResponse"].FromString,
        )
        return (await method(self.messages["HealthCheckRequest"](service=service), timeout=WAIT_S)).status


@asynccontextmanager
async def serving(folder: Path, servers: int = 2) -> AsyncIterator[Asked]:
    picker, ready, listens = build_picker(Config()), [False], asyncio.Event()
    for address in (FIRST, SECOND)[:servers]:
        picker.join(address, "mixed", EngineLoad(kv_tokens=65536))
    address = f"unix:{folder}/picker"
    task = asyncio.create_task(serve_picker(Listening(address), picker, lambda: ready[0], listens.set))
    waiting = asyncio.create_task(listens.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        async with import_module("grpc.aio").insecure_channel(address) as channel:
            yield Asked(picker, channel, message_classes(), ready)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def play(folder: Path, script: Callable[[Asked], Awaitable[None]], servers: int = 2) -> None:
    async def run() -> None:
        async with serving(folder, servers) as asked:
            await script(asked)

    asyncio.run(run())


def set_headers(response: Any) -> dict[str, str]:
    changes = response.response.header_mutation.set_headers
    return {change.header.key: change.header.raw_value.decode() for change in changes}


def metadata(reply: Any) -> str:
    found = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    return found["x-gateway-destination-endpoint"].string_value


async def chunks(stream: Any, name: str) -> list[Any]:
    """Read the chunks of a body up to the last one."""
    read: list[Any] = []
    while not read or not read[-1].end_of_stream:
        reply = await stream.read()
        assert reply.HasField(name), reply
        read.append(getattr(reply, name).response.body_mutation.streamed_response)
    return read


def test_a_streamed_request_gets_its_servers_and_its_body_back(tmp_path: Path) -> None:
    """No answer comes before the whole body, since the choice depends on it."""

    async def script(asked: Asked) -> None:
        stream = asked.open()
        await stream.write(asked.headers(x_prefiller_host_port="10.6.6.6:1"))
        await stream.write(asked.body(BODY[:100], last=False))
        await stream.write(asked.body(BODY[100:]))
        reply = await stream.read()
        addresses = set_headers(reply.request_headers)["x-gateway-destination-endpoint"]
        assert addresses == metadata(reply)
        assert {*addresses.split(",")} == {FIRST, SECOND}
        assert "x-prefiller-host-port" in reply.request_headers.response.header_mutation.remove_headers
        assert b"".join(chunk.body for chunk in await chunks(stream, "request_body")) == BODY
        picked = asked.picker.endpoints[addresses.split(",")[0]]
        assert picked.running_requests == 1

        await stream.write(asked.answer_headers("text/event-stream"))
        assert (await stream.read()).HasField("response_headers")
        sent = [b"data: {}\n\n", b"data: [DONE]\n\n"]
        for number, event in enumerate(sent, 1):
            await stream.write(asked.body(event, last=number == len(sent), name="response_body"))
        assert [chunk.body for chunk in await chunks(stream, "response_body")] == sent
        await stream.done_writing()
        assert await stream.read() == import_module("grpc.aio").EOF
        assert (picked.running_requests, asked.picker.cluster.coordinator.live_requests) == (0, 0)

    play(tmp_path, script)


def test_a_large_body_comes_back_in_chunks_that_the_proxy_can_buffer(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        stream, body = asked.open(), json.dumps({"prompt": "a" * 300_000}).encode()
        await stream.write(asked.headers())
        await stream.write(asked.body(body))
        assert (await stream.read()).HasField("request_headers")
        read = await chunks(stream, "request_body")
        assert b"".join(chunk.body for chunk in read) == body
        assert max(len(chunk.body) for chunk in read) < 65_536
        stream.cancel()

    play(tmp_path, script)


def test_a_body_with_trailers_is_complete_with_them(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        stream = asked.open()
        await stream.write(asked.headers())
        await stream.write(asked.body(BODY, last=False))
        await stream.write(asked.message(request_trailers={}))
        assert set_headers((await stream.read()).request_headers)
        assert (await stream.read()).request_body.response.body_mutation.streamed_response.body == BODY
        assert (await stream.read()).HasField("request_trailers")
        stream.cancel()

    play(tmp_path, script)


def test_a_buffered_request_is_answered_with_its_body(tmp_path: Path) -> None:
    """The proxy waits for an answer to the headers before it sends the body. Fields for engines are taken out."""

    async def script(asked: Asked) -> None:
        stream = asked.open()
        await stream.write(asked.headers(mode=BUFFERED))
        first = (await stream.read()).request_headers.response.header_mutation
        assert "x-prefiller-host-port" in first.remove_headers
        await stream.write(
            asked.body(json.dumps({"prompt": "hi", "kv_transfer_params": {"remote_host": "x"}}).encode())
        )
        reply = await stream.read()
        assert set_headers(reply.request_body)["x-gateway-destination-endpoint"] == metadata(reply)
        assert json.loads(reply.request_body.response.body_mutation.body) == {"prompt": "hi"}
        stream.cancel()

    play(tmp_path, script)


def test_a_request_without_a_body_gets_a_server_too(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        stream = asked.open()
        await stream.write(asked.headers(last=True))
        assert metadata(await stream.read())
        stream.cancel()

    play(tmp_path, script)


@pytest.mark.parametrize("subset", [[SECOND], f"{SECOND}, 10.0.0.9:80"])
def test_a_subset_limits_the_choice(tmp_path: Path, subset: object) -> None:
    async def script(asked: Asked) -> None:
        stream = asked.open()
        await stream.write(asked.headers(last=True, subset=subset))
        assert metadata(await stream.read()) == SECOND
        stream.cancel()

    play(tmp_path, script)


@pytest.mark.parametrize(
    ("servers", "subset", "mode", "status", "code"),
    [
        (0, None, DUPLEX, 503, "no_worker"),
        (2, [], DUPLEX, 503, "no_worker"),
        (2, ["10.0.0.9:80"], DUPLEX, 503, "no_worker"),
        (2, None, STREAMED, 500, "proxy_configuration"),
    ],
)
def test_a_refusal_is_an_answer_of_its_own(
    tmp_path: Path, servers: int, subset: object, mode: int, status: int, code: str
) -> None:
    async def script(asked: Asked) -> None:
        stream = asked.open()
        await stream.write(asked.headers(last=True, subset=subset, mode=mode))
        refused = (await stream.read()).immediate_response
        assert refused.status.code == status
        assert json.loads(refused.body)["error"]["code"] == code
        said = {each.header.key: each.header.raw_value.decode() for each in refused.headers.set_headers}
        assert said["content-type"] == "application/json"
        assert ("retry-after" in said) == (status == 503)
        stream.cancel()

    play(tmp_path, script, servers)


def test_a_body_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_BYTES_MAX", 100)

    async def script(asked: Asked) -> None:
        stream = asked.open()
        await stream.write(asked.headers())
        await stream.write(asked.body(b"a" * 101, last=False))
        assert (await stream.read()).immediate_response.status.code == 413
        stream.cancel()

    play(tmp_path, script)


def test_a_request_whose_client_leaves_is_no_load_any_more(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        stream = asked.open()
        await stream.write(asked.headers(last=True))
        assert metadata(await stream.read())
        assert asked.picker.cluster.coordinator.live_requests == 1
        changes = Changes(asked.picker)
        stream.cancel()
        await changes.until(lambda: not asked.picker.cluster.coordinator.live_requests)

    play(tmp_path, script)


def test_the_health_service_tells_liveness_from_readiness(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        for service in ("readiness", SERVICE, ""):
            assert await asked.health(service) == NOT_SERVING
        assert await asked.health("liveness") == SERVING
        asked.ready[0] = True
        for service in ("readiness", SERVICE, ""):
            assert await asked.health(service) == SERVING
        with pytest.raises(import_module("grpc").RpcError, match="unknown service 'other'"):
            await asked.health("other")

    play(tmp_path, script)
