"""The HTTP half over one hash engine in this process: the real application, on a real socket where a test wants one."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest
import uvloop
from starlette.types import ASGIApp

from baton.compute.hash_engine import hash_card
from baton.compute.load_engine import load_engine
from baton.compute.models.chat_template import ChatTemplate
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.sandbox.template import load_chat_template
from baton.core.config import SandboxConfig
from baton.core.limits import LimitsConfig
from baton.move.ipc.tls import ServerTls
from baton.serve.http.app import build_app
from baton.serve.http.connections import Connections
from baton.serve.http.grammar_checks import GrammarChecker
from baton.serve.http.identity import Keyring, KeySources
from baton.serve.http.model_services import ModelServices
from baton.serve.http.server import HttpServer
from baton.serve.http.services import HttpSettings, Services
from baton.serve.http.timed_connection import HttpServerConfig
from baton.serve.live.history import History
from baton.serve.live.hooks import Hooks
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recorder import Recorder
from tests.http.inprocess import InProcessGateway
from tests.serving import NO_TLS

BLOCK_TOKENS = 16


@dataclass
class House:
    """An application and the gateway behind it."""

    gateway: InProcessGateway
    app: ASGIApp
    limits: LimitsConfig
    recorder: Recorder
    metrics: Metrics
    grammars: GrammarChecker
    history: History
    loop: asyncio.AbstractEventLoop | None = None
    """The event loop of its server. None: it is not served."""

    def on_loop(self, call: Callable[[], None]) -> None:
        """Run a call in the server's thread."""

        async def run() -> None:
            call()

        assert self.loop is not None, "the house is not served"
        asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)


def build_house(
    *,
    blocks: int = 512,
    waiting_max: int = 1024,
    hooks: Hooks | None = None,
    settings: HttpSettings | None = None,
    keys: KeySources | None = None,
    limits: LimitsConfig | None = None,
    sandbox: SandboxConfig | None = None,
    template: ChatTemplate | None = None,
) -> House:
    card, sandbox = hash_card(), sandbox or SandboxConfig()
    metrics = Metrics()
    recorder, grammars = Recorder(metrics), GrammarChecker(card, sandbox)
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="uint8")
    engine = load_engine(card, layout, memoryview(bytearray(blocks * layout.block_bytes)))
    gateway = InProcessGateway(card, engine, blocks=blocks, waiting_max=waiting_max)
    history = History(gateway, recorder)
    model = ModelServices(
        gateway=gateway,
        hosts=gateway,
        tokenizer=load_tokenizer(card),
        template=template or load_chat_template(card, sandbox),
        grammars=grammars,
        history=history,
        block_tokens=BLOCK_TOKENS,
    )
    services = Services(
        models={card.name: model},
        settings=settings or HttpSettings(),
        keyring=Keyring(keys or KeySources()),
        hooks=hooks or Hooks(),
        recorder=recorder,
        render_metrics=lambda with_tenants: b"# TYPE baton_up gauge\nbaton_up 1\n",
    )
    return House(gateway, build_app(services), limits or LimitsConfig(), recorder, metrics, grammars, history)


class Server:
    """Serves a house on a free loopback port, in a thread, as `baton serve` does: uvicorn, httptools, uvloop."""

    def __init__(self, house: House, *, tls: ServerTls | None = None) -> None:
        self.house = house
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        connections = Connections(house.limits, house.recorder)
        self._uvicorn = HttpServer(HttpServerConfig(house.app, connections, close_s=3.0, tls=tls))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Server:
        self._socket.listen()  # from here on connections queue: nobody has to wait for the thread
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self.house.loop = asyncio.get_running_loop()
        steps = asyncio.create_task(self.house.gateway.run())
        await self._uvicorn.serve(sockets=[self._socket])
        steps.cancel()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for all tests that only ask."""
    with Server(build_house()) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, verify=NO_TLS) as client:
        yield client


@pytest.fixture
def serve() -> Iterator[Callable[[House], httpx.Client]]:
    """Serve a house of a test's own; returns a client of it."""
    closing: list[tuple[httpx.Client, Server]] = []

    def start(house: House) -> httpx.Client:
        server = Server(house).__enter__()
        client = httpx.Client(base_url=server.url, timeout=30, verify=NO_TLS)
        closing.append((client, server))
        return client

    yield start
    for client, server in closing:
        client.close()
        server.__exit__()


@pytest.fixture
def build() -> Callable[..., House]:
    return build_house
