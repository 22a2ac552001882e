"""A router over two cells in this process, whose connections break at every place of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.core.config import Config
from baton.decide.control.cell_router import Cell, CellRules
from baton.serve.cells.app import build_app
from baton.serve.cells.fleet import CellFleet, CellLink, CheckTimes
from baton.serve.cells.log import CellLog, is_cell_log, replay_cells
from baton.serve.http.identity import KeySources
from baton.serve.http.resume import SavedStream
from baton.serve.http.stream_marks import STREAM_TYPE, StreamStart
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recorder import Recorder
from tests.http.asgi import Connection, scope
from tests.http.conftest import Server, build_house
from tests.serving import NO_TLS

COMPLETION: dict[str, Any] = {"prompt": "two cells", "max_tokens": 12, "ignore_eos": True, "temperature": 1, "seed": 3}
CHAT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}],
    "max_tokens": 12,
    "seed": 4,
    "presence_penalty": 0.5,
    "ignore_eos": True,
}
BODIES: dict[str, dict[str, Any]] = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


class Breaking:
    """An application that breaks the connection of a response once, before one of its messages."""

    messages_left: int | None = None
    """None: none breaks. Shared by all cells."""
    posted: ClassVar[list[tuple[int, Scope]]] = []

    def __init__(self, app: ASGIApp, number: int) -> None:
        self._app, self._number = app, number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        Breaking.posted.append((self._number, scope))

        async def send_some(message: Message) -> None:
            if Breaking.messages_left == 0:
                Breaking.messages_left = None
                connection: Any = send
                connection.__self__.transport.abort()  # of uvicorn
            if Breaking.messages_left is not None:
                Breaking.messages_left -= 1
            await send(message)

        await self._app(scope, receive, send_some)


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    with ExitStack() as opened:
        urls: list[str] = []
        for number in range(2):
            house = build_house(keys=KeySources(api_keys=("k",)))
            house.app = Breaking(house.app, number)
            urls.append(opened.enter_context(Server(house)).url)
        yield urls


@pytest.fixture(autouse=True)
def whole() -> None:
    Breaking.messages_left = None
    Breaking.posted.clear()


@asynccontextmanager
async def routed(urls: list[str], log: Path | None = None) -> AsyncGenerator[tuple[httpx.AsyncClient, CellFleet]]:
    ready = asyncio.Semaphore(0)
    config, cells, rules = Config(), [Cell(url) for url in urls], CellRules()
    config = replace(config, http=replace(config.http, admin_key="a"))
    written = CellLog(log, cells, rules, 1 << 20, print) if log is not None else None
    fleet = CellFleet(
        cells, rules, CheckTimes(), lambda said: ready.release() if " is ready" in said else None, written
    )
    app = build_app(config, fleet, Recorder(Metrics()))
    checking = asyncio.create_task(fleet.run())
    try:
        for _ in urls:
            await ready.acquire()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
            client.headers["authorization"] = "Bearer k"
            yield client, fleet
    finally:
        checking.cancel()
        await asyncio.wait({checking})
        if written is not None:
            written.close()


def run(
    urls: list[str], test: Callable[[httpx.AsyncClient, CellFleet], Awaitable[None]], log: Path | None = None
) -> None:
    async def main() -> None:
        async with routed(urls, log) as (client, fleet):
            await test(client, fleet)

    asyncio.run(main())


def events(body: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]


def text(body: str) -> str:
    parts = [choice for event in events(body) for choice in event.get("choices", ())]
    return "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_breaks_anywhere_goes_on_in_the_other_cell(urls: list[str], path: str) -> None:
    """Also where a stop string holds text back, and between the last tokens and the end."""

    async def check(client: httpx.AsyncClient, fleet: CellFleet) -> None:
        first = text((await client.post(path, json={**BODIES[path], "stream": True})).text)
        asked = {**BODIES[path], "stream": True, "stop": [first[4:6] + "\n"], "stream_options": {"include_usage": True}}
        expected = (await client.post(path, json=asked)).text
        usage, ids = events(expected)[-1]["usage"], {event["id"] for event in events(expected)}
        assert len(ids) == 1
        place, broken = 0, True
        while broken:
            Breaking.messages_left = place
            response = await client.post(path, json=asked)
            broken = Breaking.messages_left is None
            assert (response.status_code, text(response.text)) == (200, text(expected)), place
            assert response.text.endswith("data: [DONE]\n\n")
            assert ": baton" not in response.text
            got = events(response.text)
            assert (got[-1]["usage"]["total_tokens"], len({event["id"] for event in got})) == (usage["total_tokens"], 1)
            place += 1
        assert place > 10
        assert fleet.resumed > 5
        assert [cell.running for cell in fleet.cells] == [0, 0]

    run(urls, check)


@pytest.mark.parametrize("read", range(3))
def test_a_cell_that_is_lost_while_the_client_does_not_read_leaves_no_hole(urls: list[str], read: int) -> None:
    """The client stops reading before the head, and before each of the next two messages."""

    async def check(client: httpx.AsyncClient, fleet: CellFleet) -> None:
        body = {**COMPLETION, "stream": True}
        expected = text((await client.post("/v1/completions", json=body)).text)
        connection, stopped, app = Connection(body), asyncio.Event(), cast(Any, client)._transport.app

        async def send(message: Message) -> None:
            if len(connection.sent) == read and not stopped.is_set():
                stopped.set()
                connection.reading.clear()
            await connection.send(message)

        asked = scope()
        asked["headers"].append((b"authorization", b"Bearer k"))
        answering = asyncio.create_task(app(asked, connection.receive, send))
        await stopped.wait()
        fleet.links[urls[Breaking.posted[-1][0]]].attempts.break_all()
        connection.reading.set()
        await answering
        starts = [message for message in connection.sent if message["type"] == "http.response.start"]
        assert (connection.text(), len(starts)) == (expected, 1)
        assert fleet.resumed == (read > 0)

    run(urls, check)


def test_a_response_that_is_not_streamed_is_computed_again(urls: list[str]) -> None:
    async def check(client: httpx.AsyncClient, fleet: CellFleet) -> None:
        expected = (await client.post("/v1/completions", json=COMPLETION)).json()["choices"]
        Breaking.messages_left = 1
        assert (await client.post("/v1/completions", json=COMPLETION)).json()["choices"] == expected
        assert fleet.resumed == 0

    run(urls, check)


@pytest.mark.parametrize(
    ("path", "more", "begins"),
    [
        ("/v1/completions", {**COMPLETION, "n": 2}, "data: {"),
        ("/v1/messages", {"messages": CHAT["messages"][1:], "max_tokens": 12}, "event: error\ndata: {"),
    ],
)
def test_a_stream_that_cannot_go_on_ends_with_an_error(
    urls: list[str], path: str, more: dict[str, Any], begins: str
) -> None:
    async def check(client: httpx.AsyncClient, fleet: CellFleet) -> None:
        Breaking.messages_left = 4
        response = await client.post(path, json={**more, "stream": True})
        last = response.text.removesuffix("\n\n").rpartition("\n\n")[2]
        assert last.startswith(begins)
        assert events(last)[0]["error"]["code"] == "cell_lost"

    run(urls, check)


def test_a_stream_without_marks_is_not_computed_again_after_a_lost_stream_with_marks() -> None:
    """The first cell breaks before its first mark, the second one, which sends no marks, after its first chunk."""
    start = msgspec.json.encode(StreamStart(response_id="r", seed=1, prompt_hash=b"h")).decode()
    marks = [f"x-baton-stream: {start}\r\n", "", ""]
    event = "data: " + json.dumps({"choices": [{"text": "once"}]}) + "\n\n"
    left = ["", event, event]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get"):
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        else:
            await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
            kind = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{marks.pop(0)}Content-Length: 999\r\n\r\n"
            writer.write((kind + left.pop(0)).encode())
        await writer.drain()
        writer.close()

    async def main() -> None:
        servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(3)]
        cells = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
        async with routed(cells) as (client, fleet):
            response = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
            assert response.text.startswith(event)
            assert events(response.text)[1]["error"]["code"] == "cell_lost"
            assert (len(left), fleet.resumed) == (1, 0)
        for server in servers:
            server.close()
            await server.wait_closed()

    asyncio.run(main())


def test_a_conversation_stays_in_its_cell_and_a_drained_one_gets_no_request(urls: list[str]) -> None:
    turns = [*CHAT["messages"], {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And now?"}]

    async def check(client: httpx.AsyncClient, fleet: CellFleet) -> None:
        for messages in (turns[:2], turns):
            assert (await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})).status_code == 200
        (home, _), (again, _) = Breaking.posted
        assert home == again
        drain = {"cell": urls[home], "drain": True}
        assert (await client.post("/cluster/cells", json=drain)).status_code == 401
        admin = {"authorization": "Bearer a"}
        drained = (await client.post("/cluster/cells", json=drain, headers=admin)).json()["cells"][home]
        assert (drained["draining"], drained["state"]) == (True, "ready")
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert Breaking.posted[-1][0] != home
        wrong = await client.post("/cluster/cells", json={**drain, "cell": "http://x"}, headers=admin)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "unknown_cell")

    run(urls, check)


def test_cells_get_the_clients_key_and_address_but_not_its_connection_headers(urls: list[str]) -> None:
    own = {"x-api-key": "schlüssel".encode(), "x-old": "grün".encode("latin-1")}  # the second one is sent in UTF-8
    sent = {"x-prefiller-host-port": "1.2.3.4:5", "x-baton-marks": "0", "x-forwarded-for": "6.6.6.6", "x-tier": "gold"}

    async def check(client: httpx.AsyncClient, fleet: CellFleet) -> None:
        response = await client.post("/v1/completions", json=COMPLETION, headers=[*sent.items(), *own.items()])
        assert response.status_code == 200
        got = dict(Breaking.posted[-1][1]["headers"])
        kept = {name: got.get(name) for name in (b"authorization", b"x-tier", b"x-forwarded-for", b"x-baton-marks")}
        assert list(kept.values()) == [b"Bearer k", b"gold", b"127.0.0.1", b"1"]
        assert [got[name.encode()].decode() for name in own] == ["schlüssel", "grün"]
        refused = await client.post("/v1/completions", json=COMPLETION, headers={"authorization": "Bearer no"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        models = await client.get("/v1/models")
        assert models.json()["data"][0]["id"] == "hash"

    run(urls, check)


def test_the_edge_has_the_limits_of_a_server(urls: list[str]) -> None:
    async def check(client: httpx.AsyncClient, fleet: CellFleet) -> None:
        large = await client.post("/v1/completions", json={"prompt": "x" * (4 << 20)})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        kind = await client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert kind.status_code == 415
        assert (await client.post("/v1/files", json={})).json()["error"]["code"] == "not_found"
        unread = await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert unread.status_code == 400, "a cell's answer"

    run(urls, check)


def test_stored_state_is_looked_for_in_each_cell_and_every_decision_is_replayed(
    urls: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "cells.log"

    async def check(client: httpx.AsyncClient, fleet: CellFleet) -> None:
        unknown = {"x-baton-resume": "a" * 32}
        for _ in range(2):
            response = await client.post("/v1/completions", json=COMPLETION, headers=unknown)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_resume_id")
        assert {number for number, _ in Breaking.posted} == {0, 1}
        metrics = (await client.get("/metrics")).text
        assert metrics.count("baton_cell_ready{") == 2
        assert sum(float(line.split()[-1]) for line in metrics.splitlines() if 'cause="unknown"' in line) == 4.0

    run(urls, check, log)
    assert is_cell_log(log)
    agreed, difference, _ = replay_cells(log)
    assert (agreed > 8, difference) == (True, None)
    with log.open("ab") as file:
        file.write(b'{"type":"CellDec')
    assert replay_cells(log)[0] == agreed


@pytest.mark.parametrize(
    ("path", "more", "output", "status"),
    [
        ("/v1/completions", {}, (999,), 400),
        ("/v1/completions", {"n": 2}, (70,), 400),
        ("/v1/completions", {"echo": True, "logprobs": 1}, (70,), 400),
        ("/v1/completions", {}, (70,) * 12, 409),
        ("/v1/completions", {"prompt": "another one"}, (70,), 409),
        ("/v1/messages", {}, (70,), 415),
    ],
)
def test_a_stream_that_cannot_be_of_the_server_is_refused(
    urls: list[str], path: str, more: dict[str, Any], output: tuple[int, ...], status: int
) -> None:
    body = json.dumps({**COMPLETION, **more, "stream": True}).encode()
    key, marks = {"authorization": "Bearer k"}, {"x-baton-marks": "1"}
    asked = {**COMPLETION, "stream": True}
    started = httpx.post(f"{urls[0]}/v1/completions", json=asked, headers=key | marks, verify=NO_TLS)
    start = msgspec.json.decode(started.headers["x-baton-stream"], type=StreamStart)
    stream = SavedStream(path="", owner="", body=body, output=output, expires_unix_s=0, **msgspec.structs.asdict(start))
    sent, kind = msgspec.msgpack.encode(stream), {"content-type": STREAM_TYPE}
    response = httpx.post(f"{urls[0]}{path}", content=sent, headers=key | kind, verify=NO_TLS)
    assert response.status_code == status, response.text


def test_without_a_cell_requests_are_refused_in_openais_form() -> None:
    async def main() -> None:
        fleet = CellFleet([Cell("http://127.0.0.1:9")], CellRules(), CheckTimes(), print, None)
        app = build_app(Config(), fleet, Recorder(Metrics()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            for response in (await client.post("/v1/completions", json=COMPLETION), await client.get("/ready")):
                assert (response.status_code, response.json()["error"]["code"]) == (503, "no_cell")
                assert response.headers["retry-after"] == "1"
        for link in fleet.links.values():
            await link.session.close()

    asyncio.run(main())


def test_an_attempt_at_a_cell_that_hangs_fails_once_the_cell_is_lost() -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
            asked.set()
            await reader.read()
            writer.close()

        async def read() -> None:
            async with link.attempts.block(), link.session.get(link.url) as response:
                await response.read()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        link = CellLink(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        reading = asyncio.create_task(read())
        await asked.wait()
        link.attempts.break_all()
        with pytest.raises(TimeoutError):
            await reading
        await link.session.close()
        server.close()
        await server.wait_closed()

    asyncio.run(main())
