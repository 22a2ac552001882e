"""Run one model of the server: its own workers, the hosts that join it, and its tiers, until all of them have ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import msgspec

from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.sandbox.template import load_chat_template
from baton.core.copies import LayersDone
from baton.core.leaving import DismissHost, RestartWorker
from baton.core.messages import RetireWorker, StartWorker, StepReport
from baton.core.types import WorkerId
from baton.move.ipc.tls import ServerTls
from baton.serve.host.arena_bytes import bytes_of, transferable
from baton.serve.host.supervisor import Notices, Supervisor
from baton.serve.host.tasks import prefault, spawn
from baton.serve.host.worker_link import EngineHosts, WorkerLink, WorkerMessage
from baton.serve.http.body_threads import BodyThreads
from baton.serve.http.grammar_checks import GrammarChecker
from baton.serve.http.model_routes import ModelStatus
from baton.serve.http.model_services import ModelServices, tokenizing_threads
from baton.serve.http.prompts import PublicPrefixes
from baton.serve.live.assembly import Parts
from baton.serve.live.driver import Driver
from baton.serve.live.hosts import Hosts
from baton.serve.live.tiers import kv_blocks
from baton.serve.messages.setup import FromWorkerMessage


class OwnWorkers:
    """Passes the reports of the workers on the server's own host to the driver. Implements `WorkerListener`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._ready: set[WorkerId] = set()
        self._decoder = msgspec.msgpack.Decoder(FromWorkerMessage)

    def add(self, link: WorkerLink) -> None:
        self._driver.links[link.view.id] = link

    def join(self, link: WorkerLink) -> None:
        self._ready.add(link.view.id)
        self._driver.join(link)

    def lose(self, worker: WorkerId, reason: str) -> None:
        if worker in self._ready:
            self._ready.discard(worker)
            self._driver.lose(worker, reason)

    def retire(self, worker: WorkerId, reason: str) -> None:
        self._ready.discard(worker)
        self._driver.lose(worker, reason)
        del self._driver.links[worker]

    def receive(self, worker: WorkerId, payload: bytes) -> WorkerMessage | None:
        message = self._decoder.decode(payload)
        if isinstance(message, StepReport | LayersDone):
            self._driver.apply_report(message)
            return None
        return message


_CHECK_S = 30.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What all models of a server share."""

    url: str
    """Address of the server, for messages."""
    join_url: str
    """URL at which hosts join."""
    tls: ServerTls | None
    """Its certificate. None: connections are not encrypted."""
    tell: Tell
    """Gets lines for the terminal."""
    tokenizing: BodyThreads = field(default_factory=tokenizing_threads)


class ModelFleet:
    """Runs the workers and hosts of one model, from `start` to `close`."""

    def __init__(
        self,
        parts: Parts,
        server: ServerFacts,
        *,
        changed: Callable[[], None],
        is_first: bool = True,
        engines: EngineHosts | None = None,
    ) -> None:
        """Create a stopped fleet for one model.

        `changed`: called when the model becomes ready or has failed. `is_first`: the model is one of those that the
        server starts with. `engines`: the model's workers, if they are servers of another engine. None: they are not.
        """
        self.parts = parts
        self.services: ModelServices | None = None
        """What the routes need. None: the tokenizer is not loaded yet."""
        self.failure = ""
        """Why no worker can be kept alive. Empty: one can."""
        self._settled = asyncio.Event()
        """Set once the model is ready or has failed."""
        self._server = server
        self._tell = server.tell
        self._changed = changed
        self._engines = engines
        self._is_first = is_first
        self._tasks: list[asyncio.Task[None]] = []
        self._hosts = Hosts(parts, url=server.url, tls=server.tls, tell=self._tell, changed=self._on_hosts)
        self._own: Supervisor | None = None
        self._is_own_ready = parts.own is None

    @property
    def name(self) -> str:
        """Name of the model for clients."""
        return self.parts.card.name

    async def start(self) -> ModelServices:
        """Start the tiers and the workers, and load the text tools. Raises ModelError or ConfigError.

        The workers load the model in the background; `changed` is called once they have.
        """
        await self._start_tiers()
        if self._engines is not None:
            await self._engines.start(self._on_hosts)
        if self.parts.launcher is not None:
            await self.parts.launcher.start(self._server.join_url, self.parts.driver.lose)
        self._start_workers()
        # Read the tokenizer while the workers start: it takes as long as their imports.
        self.services = await asyncio.to_thread(self._load_services)
        self._on_ready()
        return self.services

    async def wait_settled(self) -> None:
        """Wait until the model is ready for requests, or has failed."""
        await self._settled.wait()

    async def drain(self) -> None:
        """Wait up to `drain_s` seconds for the running requests, then cancel them. End dashboard streams at once."""
        parts = self.parts
        parts.history.close()
        parts.gateway.state = "stopping"  # also if `drain_s` is 0: then `stop` does not begin
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(parts.gateway.stop(), parts.config.survival.drain_s)
        parts.gateway.cancel_all()

    async def close(self) -> None:
        """Stop everything that was started. No process is left when this returns, and the arena is unmapped."""
        parts = self.parts
        self.failure = self.failure or "it was unloaded"
        self._settled.set()
        if self.services is not None:
            self.services.close()
        self.services = None  # frees the tokenizer now: the rest of an unloaded model waits for the garbage collector
        await self._hosts.stop()
        if self._engines is not None:
            await self._engines.stop()
        if self._own is not None:
            await self._own.stop()
        if parts.launcher is not None:
            await parts.launcher.stop()
        for task in self._tasks:
            task.cancel()
        if parts.driver.log is not None:
            parts.driver.log.close()
        if parts.own_tiers is not None:
            await parts.own_tiers.close()
        if parts.own is not None:
            parts.own.arena.close()

    def check_blocks(self) -> None:
        """Raise AssertionError if a pool has lost a block (INV-4)."""
        for pool in self.parts.driver.pools.values():
            pool.check()

    def status(self) -> ModelStatus:
        """Return the state of the model for administrators."""
        own = self.parts.own
        return ModelStatus(
            id=self.name,
            state=self.parts.gateway.state,
            workers=len(self.parts.driver.links),
            cores=len(self.parts.computing.share.cores),
            kv_bytes=0 if own is None else own.arena.bytes_total,
        )

    def refresh_metrics(self) -> None:
        """Set the gauges of workers and KV blocks to their present values."""
        driver, metrics = self.parts.driver, self.parts.metrics
        metrics.set_workers(link.view for link in driver.links.values() if link.state != "lost")
        metrics.set_blocks(kv_blocks(driver.pools.values()))

    def summary(self) -> str:
        """Return the model, its precision, its workers and the size of its KV cache, for the terminal."""
        driver, dtype = self.parts.driver, self.parts.computing.dtype
        roles = [link.view.role for link in driver.links.values()]
        topology = " + ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
        kv_tokens = sum(pool.view().blocks_total for pool in driver.pools.values()) * driver.layout.block_tokens
        return f"model {self.name} ({dtype})  {topology}  KV cache {kv_tokens} tokens"

    # ---- starting

    async def _start_tiers(self) -> None:
        own, tiers = self.parts.own, self.parts.own_tiers
        if own is not None and tiers is not None:
            layout = self.parts.computing.layout
            await tiers.start(bytes_of(transferable(own.arena, layout), layout.block_bytes), layout.block_bytes)

    def _start_workers(self) -> None:
        """Start the workers of the server's own host, if it has any."""
        parts = self.parts
        if self._engines is not None:
            return
        if parts.own is None:
            hint = f": baton host --join {self._server.url}" if parts.launcher is None else ""
            self._tell(f"waiting for {parts.config.hosts.expected} hosts{hint}")
            return
        own, notices = parts.own, Notices(tell=self._tell, ready=self._on_own_ready, failed=self._on_failed)
        cores, survival = parts.computing.share.cores, parts.config.survival
        self._own = Supervisor(OwnWorkers(parts.driver), own.setups, own.descriptors, survival, notices, cores)
        self._own.start()

    def _load_services(self) -> ModelServices:
        parts, prefixes = self.parts, self.parts.config.http.public_prefixes
        tokenizer, template = load_tokenizer(parts.card), load_chat_template(parts.card, parts.config.sandbox)
        return ModelServices(
            gateway=parts.gateway,
            hosts=self._hosts,
            tokenizer=tokenizer,
            template=template,
            grammars=GrammarChecker(parts.card, parts.config.sandbox),
            history=parts.history,
            block_tokens=parts.driver.layout.block_tokens,
            is_first=self._is_first,
            engine=parts.config.engines.names,
            public_prefixes=PublicPrefixes(prefixes, tokenizer, template) if prefixes else None,
            tokenizing=self._server.tokenizing,
        )

    # ---- changes

    def _on_own_ready(self) -> None:
        self._is_own_ready = True
        self._on_ready()

    def _on_hosts(self) -> None:
        """Reject requests while no host can serve them, and accept them again once a host can."""
        gateway, engines = self.parts.gateway, self._engines
        joined, can_serve = self._hosts.joined, self._hosts.ready > 0
        hint = f": baton host --join {self._server.url}"
        if engines is not None:
            joined, can_serve, hint = engines.joined, engines.can_serve, ""
            if engines.failure:
                self._on_failed(engines.failure)
                return
        is_asleep = self.parts.driver.cluster.coordinator.reshaping.is_asleep
        if gateway.state == "ready" and self._own is None and not joined and not is_asleep:
            gateway.state = "deserted"
            waiting, wait_s = len(self.parts.driver.live), self.parts.config.survival.wait_s
            self._tell(f"all hosts are gone; {waiting} requests wait for one, up to {wait_s:g} s{hint}")
        elif gateway.state == "deserted" and can_serve:
            gateway.state = "ready"
            self._tell("a host has joined: serving again")
        self._on_ready()

    def _on_ready(self) -> None:
        """Accept requests once the tokenizer is loaded and every expected host and worker is ready."""
        services, parts = self.services, self.parts
        is_waiting = not self._is_own_ready or self._hosts.ready < parts.config.hosts.expected
        is_waiting = is_waiting or (self._engines is not None and not self._engines.can_serve)
        if parts.gateway.state != "loading" or is_waiting or services is None:
            return
        parts.gateway.state = "ready"
        self._run(self._check_at_idle())
        self._run(services.grammars.warm_up())
        if parts.own is not None:
            self._run(prefault(parts.own.arena, self._on_failed))
        self._run(self._tick())
        self._run(parts.history.run())
        self._run(self._resize_fleet())
        self._settled.set()
        self._changed()

    def _on_failed(self, reason: str) -> None:
        self.failure = reason
        self.parts.gateway.state = f"failed: {reason}"
        self._tell(f"no worker can be kept alive: {reason}")
        self.parts.gateway.cancel_all()
        self._settled.set()
        self._changed()

    # ---- in the background

    def _run(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(spawn(work, self._tell))

    async def _tick(self) -> None:
        """Run the policies for roles, scaling and moves every `tick_s` seconds."""
        while True:
            await asyncio.sleep(self.parts.config.tick_s)
            self.parts.driver.tick()

    async def _resize_fleet(self) -> None:
        """Carry out the driver's decisions about workers and hosts, in their order."""
        while True:
            self._resize(await self.parts.driver.resizes.get())

    def _resize(self, command: StartWorker | RetireWorker | RestartWorker | DismissHost) -> None:
        """Carry out a decision about the fleet, on the server's own host or on a joined host."""
        driver, own = self.parts.driver, self.parts.own
        if isinstance(command, RetireWorker | RestartWorker):
            host = driver.links[command.worker].view.host if command.worker in driver.links else ""
        else:
            host = command.host
        if not isinstance(command, DismissHost) and self._own is not None and own is not None and host == own.id:
            self._own.resize(command)
        elif not self._resize_launched(command) and not self._hosts.resize(command):
            self._tell(f"no host can carry out this decision: {command}")
            if isinstance(command, StartWorker):
                driver.lose(command.worker, "no host can start it")
            elif isinstance(command, RestartWorker) and command.worker in driver.links:
                driver.join(driver.links[command.worker])  # it stays; the restart goes on with the next one

    def _resize_launched(self, command: StartWorker | RetireWorker | RestartWorker | DismissHost) -> bool:
        """Carry out a command with the launcher: start a host, or end one with its last worker. False: it cannot."""
        launcher, driver = self.parts.launcher, self.parts.driver
        if launcher is not None and isinstance(command, StartWorker):
            launcher.launch(command)
            return True
        if launcher is None or not isinstance(command, RetireWorker) or command.worker not in driver.links:
            return False
        host = driver.links[command.worker].view.host
        others = [link for name, link in driver.links.items() if link.view.host == host and name != command.worker]
        if any(link.state != "lost" for link in others) or not launcher.retire(host):
            return False
        if host in self._hosts.members:
            self._hosts.members[host].ask_to_leave("scaling asks for fewer hosts")
        return True

    async def _check_at_idle(self) -> None:
        """Check for lost KV blocks (INV-2, INV-4) whenever no request is running."""
        while True:
            await asyncio.sleep(_CHECK_S)
            driver = self.parts.driver
            if driver.live or any(pool.holders for pool in driver.pools.values()):
                continue
            try:
                self.check_blocks()
            except AssertionError as error:
                self._tell(
                    f"bug in Baton, please report it: the counts of KV blocks disagree: {error}; restart to free them"
                )
