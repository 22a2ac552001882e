"""The port that hosts join by: what a stranger on it can do, and what a host is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import uvloop

from baton.compute.models.fingerprint import kv_identity
from baton.compute.models.resolve import resolve_model
from baton.core.config import Config, HostsConfig
from baton.core.kv_config import TierConfig
from baton.core.messages import StartWorker, WorkerLost
from baton.core.types import HostId, WorkerId, WorkerView
from baton.decide.kv.conversion import KVForm
from baton.move.ipc import acceptor
from baton.move.ipc.frames import ControlReader, ControlWriter
from baton.move.ipc.tls import ServerTls
from baton.serve.live import hosts as module
from baton.serve.live import joined_host, waiting
from baton.serve.live.assembly import Parts, assemble
from baton.serve.live.hosts import Hosts, shared_config
from baton.serve.live.log_file import read_log
from baton.serve.messages.hosting import (
    HostHello,
    HostLeaves,
    HostTerms,
    JoinRefused,
    Welcome,
    WorkerStarting,
    WorkerUp,
)
from baton.serve.messages.moving import MoverReady
from tests.process.test_tls import write_certificate

URL = "http://127.0.0.1:8000"
SILENT_S = 300.0
"""Longer than any of these tests: nothing here ends by silence."""


def _parts(tiers: tuple[TierConfig, ...] = (), log: str = "") -> Parts:
    config = Config(model="hash", hosts=HostsConfig(expected=1, silent_s=SILENT_S), tiers=tiers, log=log)
    return assemble(config, resolve_model("hash"))


def _open(play: Callable[[int], Awaitable[None]]) -> None:
    """Let it play with the port open."""

    async def run() -> None:
        hosts = Hosts(_parts(), url=URL, tls=None, tell=lambda _line: None, changed=lambda: None)
        try:
            await play((await hosts.terms()).port)
        finally:
            await hosts.stop()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_connection_too_many_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_host, "CONNECTIONS_MAX", 2)

    async def play(port: int) -> None:
        ways = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await ways[2][0].read() == b"", "the third one is heard"
        for reader, writer in ways[:2]:
            writer.write(ControlWriter().frame(msgspec.msgpack.encode(HostLeaves("it was nothing"))))
            assert b"send a hello first" in await reader.read(), "one that may be there is not heard"
        for _reader, writer in ways:
            writer.close()

    _open(play)


def test_a_host_is_accepted_once_there_is_a_file_descriptor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener of uvloop closes a connection for which there is none."""

    async def run() -> None:
        hosts = Hosts(_parts(), url=URL, tls=None, tell=lambda _line: None, changed=lambda: None)
        port = (await hosts.terms()).port
        with socket.socket() as client:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                client.connect(("127.0.0.1", port))
                while not caplog.records:  # noqa: ASYNC110  no event tells when accepting has failed
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            reader, writer = await asyncio.open_connection(sock=client)
            writer.write(ControlWriter().frame(msgspec.msgpack.encode(HostLeaves("it was nothing"))))
            assert b"send a hello first" in await reader.read()
            writer.close()
        await hosts.stop()

    monkeypatch.setattr(acceptor, "ACCEPT_RETRY_S", 0.01)
    with caplog.at_level(logging.WARNING, logger="baton.server"):
        uvloop.run(asyncio.wait_for(run(), 30))


def test_a_stranger_cannot_make_the_server_hold_a_large_message() -> None:
    """Everybody may connect: what comes before a word of welcome is small, or the connection ends."""

    async def play(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ControlWriter().frame(bytes(1 << 17))[: 1 << 10])
        await reader.read()
        writer.close()

    _open(play)


def test_a_stranger_who_has_not_asked_to_join_is_nobody_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait longer while a host joins: whoever has found the port could hold them up so, again and again."""

    async def run() -> None:
        parts = _parts()
        hosts = Hosts(parts, url=URL, tls=None, tell=lambda _line: None, changed=lambda: None)
        port, arrivals = (await hosts.terms()).port, parts.driver.arrivals
        assert not arrivals.is_any, "the host that asked has not connected"
        _reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not arrivals.is_any:  # noqa: ASYNC110  no event tells when a connection is accepted
            await asyncio.sleep(0)
        monkeypatch.setattr(waiting, "TOKEN_S", -1.0)
        assert not arrivals.is_any, "the token is too old for this connection"
        writer.close()
        await hosts.stop()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_connection_without_a_tls_handshake_is_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The event loop does not report its end. 4,096 of them would fill the port for ever."""
    monkeypatch.setattr(joined_host, "_HELLO_S", 0.1)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    write_certificate(cert, key)

    async def run() -> None:
        parts = _parts()
        hosts = Hosts(parts, url=URL, tls=ServerTls(cert, key), tell=lambda _line: None, changed=lambda: None)
        reader, writer = await asyncio.open_connection("127.0.0.1", (await hosts.terms()).port)
        writer.write(b"no handshake\r\n" * 100)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        assert parts.driver.arrivals.unauthenticated
        while parts.driver.arrivals.unauthenticated:  # noqa: ASYNC110  no event tells when a connection is forgotten
            await asyncio.sleep(0)
        writer.close()
        await hosts.stop()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_hosts_that_ask_at_the_same_time_are_told_one_port() -> None:
    async def ask() -> set[int]:
        hosts = Hosts(_parts(), url=URL, tls=None, tell=lambda _line: None, changed=lambda: None)
        ports = {terms.port for terms in await asyncio.gather(*(hosts.terms() for _ in range(3)))}
        await hosts.stop()
        return ports

    assert len(asyncio.run(ask())) == 1


def test_hosts_are_not_told_what_is_the_servers_alone() -> None:
    """What lies on the server's own machine is its own; a store of all, hosts have to open."""
    own, shared = TierConfig(url="file:///var/cache/of-the-server"), TierConfig(url="pool://10.0.0.1:8700")
    assert shared_config(_parts((own, shared))).tiers == (shared,)


def test_a_host_prices_its_steps_by_its_own_device() -> None:
    """What the server has guessed of its own CPU says nothing of the host's workers."""
    model, given = "smollm2-135m", {"decode_request_s": 0.5}
    parts = assemble(Config(model=model, hosts=HostsConfig(expected=1), cost=given), resolve_model(model))
    assert parts.config.cost["step_overhead_s"] > 0
    assert shared_config(parts).cost == given


def test_a_host_on_another_device_is_told_of_when_it_joins() -> None:
    told: list[str] = []
    model = "smollm2-135m"

    async def run() -> None:
        config = Config(model=model, hosts=HostsConfig(expected=1, silent_s=SILENT_S))
        parts = assemble(config, resolve_model(model))
        hosts = Hosts(parts, url=URL, tls=None, tell=told.append, changed=lambda: None)
        terms = await hosts.terms()
        hello = msgspec.structs.replace(_hello(parts, terms), prices={"step_overhead_s": 1e-6})
        reader, writer = await asyncio.open_connection("127.0.0.1", terms.port)
        writer.write(ControlWriter().frame(msgspec.msgpack.encode(hello)))
        await reader.read(1)
        writer.close()
        await hosts.stop()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert any(line.startswith("a predicts other step times") for line in told), told


def _hello(parts: Parts, terms: HostTerms, blocks_total: int = 64, block_tokens: int = 16) -> HostHello:
    return HostHello(
        token=terms.token,
        host=HostId("a"),
        pid=1,
        form=KVForm(
            identity=kv_identity(parts.card),
            layout=msgspec.structs.replace(parts.driver.layout, block_tokens=block_tokens),
        ),
        blocks_total=blocks_total,
        mover=MoverReady(pid=2, machine="m", transports=("tcp",), address="127.0.0.1:1"),
        mover_generation=1,
    )


async def _answer_to(hosts: Hosts, parts: Parts, blocks_total: int, block_tokens: int) -> JoinRefused | Welcome:
    """Ask for terms, and say hello with the token of it."""
    terms = await hosts.terms()
    reader, writer = await asyncio.open_connection("127.0.0.1", terms.port)
    writer.write(ControlWriter().frame(msgspec.msgpack.encode(_hello(parts, terms, blocks_total, block_tokens))))
    frames = ControlReader()
    while True:
        for payload in frames.feed(await reader.read(1 << 16)):
            writer.close()
            return msgspec.msgpack.decode(payload, type=JoinRefused | Welcome)


def _asked(blocks_total: int = 64, block_tokens: int = 16) -> JoinRefused | Welcome:
    async def run() -> JoinRefused | Welcome:
        parts = _parts()
        hosts = Hosts(parts, url=URL, tls=None, tell=lambda _line: None, changed=lambda: None)
        try:
            answer = await _answer_to(hosts, parts, blocks_total, block_tokens)
            assert hosts.joined == isinstance(answer, Welcome), "one that was refused counts as a host"
            return answer
        finally:
            await hosts.stop()

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_a_token_is_good_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a fresh one is welcome; one that found an old one has to ask, and may."""
    assert isinstance(_asked(), Welcome)
    monkeypatch.setattr(module, "TOKEN_S", -1.0)
    answer = _asked()
    assert isinstance(answer, JoinRefused)
    assert answer.again
    assert "is older than" in answer.reason


@pytest.mark.parametrize(
    ("blocks_total", "block_tokens", "why"),
    [
        (0, 16, "0 KV blocks"),
        (1 << 60, 16, "KV blocks"),
        (64, 0, "block_tokens is 0"),
        (64, -16, "block_tokens is -16"),
    ],
)
def test_a_host_whose_numbers_cannot_be_is_told_so(blocks_total: int, block_tokens: int, why: str) -> None:
    """Nor is anything left of it here: so many blocks have no room in our books, and blocks of no tokens no place."""
    answer = _asked(blocks_total, block_tokens)
    assert isinstance(answer, JoinRefused)
    assert why in answer.reason


def test_what_a_host_was_to_start_will_not_come_once_it_is_gone(tmp_path: Path) -> None:
    """The coordinator is told, so that scaling asks again. One that has named no worker yet is not asked at all."""
    path, view = tmp_path / "decisions.log", WorkerView(id=WorkerId("a.mixed-0"), host=HostId("a"), role="mixed")
    wanted = [StartWorker(WorkerId(name), "mixed", HostId("a")) for name in ("one", "two", "three")]

    async def run() -> None:
        parts, news = _parts(log=str(path)), asyncio.Queue[None]()
        hosts = Hosts(parts, url=URL, tls=None, tell=lambda _line: None, changed=lambda: news.put_nowait(None))
        terms = await hosts.terms()
        reader, agent = await asyncio.open_connection("127.0.0.1", terms.port)
        writer = ControlWriter()
        agent.write(writer.frame(msgspec.msgpack.encode(_hello(parts, terms))))
        await reader.read(1)  # the beginning of its word of welcome
        assert not hosts.resize(wanted[0]), "its workers are not being started yet: it would not hear"
        for message in (WorkerStarting(view), WorkerUp(view.id, 1)):
            agent.write(writer.frame(msgspec.msgpack.encode(message)))
        await news.get()
        assert all(hosts.resize(command) for command in wanted)
        started = WorkerView(id=wanted[0].worker, host=HostId("a"), role="mixed")
        for message in (WorkerStarting(started), WorkerUp(started.id, 2)):
            agent.write(writer.frame(msgspec.msgpack.encode(message)))
        await news.get()
        agent.close()
        await news.get()
        await hosts.stop()
        parts.driver.log.close()
        assert not parts.driver.layouts, "hosts come and go for as long as the server lives"

    asyncio.run(asyncio.wait_for(run(), 30))
    failed = [entry.event.worker for entry in read_log(path)[1] if isinstance(entry.event, WorkerLost)]
    assert failed == ["three", "two"]
