"""The other hosts of the cluster: admit them, pass on their reports, and handle their loss."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from baton.compute.models.fingerprint import kv_identity
from baton.core.config import Config, HooksConfig
from baton.core.errors import RequestError
from baton.core.http_config import HttpConfig
from baton.core.kv_config import KVConfig
from baton.core.launching import LauncherConfig
from baton.core.leaving import DismissHost, RestartWorker
from baton.core.messages import RetireWorker, StartWorker
from baton.core.tier_messages import StoreEvent
from baton.core.types import HostId
from baton.decide.control.cluster_messages import HostAdded
from baton.decide.kv.conversion import IncompatibleKV, KVForm, negotiate
from baton.decide.kv.window import request_tokens_max
from baton.move.clock import now_s
from baton.move.ipc.acceptor import Acceptor, listen
from baton.move.ipc.challenge import SECRET_BYTES
from baton.move.ipc.tls import ServerTls
from baton.serve.host.mover_supervisor import MoverSupervisor
from baton.serve.host.tier_opening import is_shared
from baton.serve.live.assembly import Parts, window_of
from baton.serve.live.gateway import SERVING_STATES
from baton.serve.live.joined_host import AgentReceiver, JoinedHost
from baton.serve.live.kept_arenas import ArenaTable, KeptArenas
from baton.serve.live.waiting import TOKEN_S
from baton.serve.messages.hosting import HostHello, HostTerms, JoinRefused, Welcome
from baton.serve.messages.moving import MoverEvent, MoverReady, MoverSetup, TierOrder

_NAME_FREE_RATIO = 1.5
"""A new host retries a taken name for this multiple of `hosts.silent_s`: its earlier process may have just died."""
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TOKENS_MAX = 256
_BLOCKS_MAX = 1 << 24
"""Maximum KV blocks of a host. This bounds the memory for the metadata of its pool."""
PRICE_FACTOR_MAX = 2.0
"""Prices within this factor count as equal, because the estimates err by up to a third."""


class Hosts:
    """Admits hosts and tracks them. Opens a port and starts the server's own mover for the first host that joins."""

    def __init__(
        self,
        parts: Parts,
        *,
        url: str,
        tls: ServerTls | None,
        tell: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        """`url`: URL of this server, for messages. `tls`: its certificate. None: connections are not encrypted."""
        self.driver = parts.driver
        self.copying = parts.driver.copying
        self._parts = parts
        self._url = url
        self._tls = tls
        self._tell = tell
        self._changed = changed
        self._joined: dict[HostId, JoinedHost] = {}
        self.members: Mapping[HostId, JoinedHost] = self._joined
        """The joined hosts."""
        self._arrivals = parts.driver.arrivals
        self._mover_secret = secrets.token_bytes(SECRET_BYTES)
        self._opening = asyncio.Lock()
        self._listening: socket.socket | None = None
        self._acceptor: Acceptor | None = None
        self._mover: MoverSupervisor | None = None
        self._movers: dict[HostId, int] = {}
        """Generation of each host's mover, for the hosts whose mover is ready."""
        self._form: KVForm | None = None
        self._kept = KeptArenas(parts.config.survival)

    @property
    def joined(self) -> int:
        """Number of joined hosts, whether their workers are ready or not."""
        return len(self._joined)

    @property
    def ready(self) -> int:
        """Number of hosts whose workers are all ready."""
        return sum(host.is_ready for host in self._joined.values())

    def missing(self) -> str:
        """Describe the workers and hosts that the server waits for before it is ready. Empty: it waits for none."""
        loading = [link.view.id for link in self.driver.links.values() if link.state == "starting"]
        found = [f"{', '.join(loading)} to load the model"] if loading else []
        expected = self._parts.config.hosts.expected
        if len(self._joined) < expected:
            absent = expected - len(self._joined)
            found.append(f"{absent} of {expected} hosts to join (baton host --join {self._url})")
        return " and ".join(found)

    # ---- joining

    async def terms(self) -> HostTerms:
        """Return the port, token and configuration for a host to join. Raises RequestError if no host can join."""
        if self._parts.config.engines.is_used:
            message = "this server's workers are servers of another engine, which exchange no KV with hosts"
            raise RequestError(f"{message}; start another server for hosts", status=409, code="no_hosts")
        async with self._opening:  # hosts that ask at the same time share one port
            if self._form is None:
                identity = await asyncio.to_thread(kv_identity, self._parts.card)
                self._form = KVForm(identity=identity, layout=self.driver.layout)
            if self._listening is None:
                await self._listen()
        assert self._listening is not None
        token = secrets.token_hex(16)
        self._arrivals.tokens[token] = now_s()
        if len(self._arrivals.tokens) > _TOKENS_MAX:
            self._arrivals.tokens.popitem(last=False)
        port = self._listening.getsockname()[1]
        return HostTerms(
            port=port,
            token=token,
            tls=self._tls is not None,
            mover_secret=self._mover_secret,
            config=shared_config(self._parts),
        )

    async def _listen(self) -> None:
        config = self._parts.config
        try:
            self._listening = await asyncio.to_thread(listen, config.http.host, config.hosts.port)
        except OSError as error:
            message = f"the server cannot listen for hosts on {config.http.host}:{config.hosts.port}: {error}"
            raise RequestError(f"{message}; set hosts.port to a free one", status=503, code="no_hosts") from error
        self._acceptor = Acceptor(
            self._listening, AgentReceiver(self, config.hosts.silent_s, self._arrivals, self._tls)
        )

    def admit(self, host: JoinedHost, hello: HostHello) -> Welcome | JoinRefused:
        """Let a host join, or refuse it with a reason."""
        refusal = self._refusal(hello)
        if refusal is not None:
            self._tell(f"{hello.host} at {host.stream.peer} may not join: {refusal.reason}")
            return refusal
        layout = hello.form.layout
        self._start_own_mover(host.stream.address)
        self._arrivals.unauthenticated.discard(host)
        self._joined[hello.host] = host
        self._arrivals.without_workers.add(hello.host)
        kept = self._kept.take(hello.arena_id, hello.blocks_total)
        self.driver.add_host(
            HostAdded(hello.host, hello.blocks_total, layout, tuple(hello.mover.tiers), hello.workers_max, kept)
        )
        self._parts.gateway.limit_requests()
        self.copying.add_host(hello.host, host, layout)
        self.mover_ready(hello.host, hello.mover_generation, hello.mover)
        full = f", {len(kept)} of them with KV from before the restart" if kept else ""
        self._tell(f"{hello.host} has joined from {host.stream.peer} with {hello.blocks_total} KV blocks{full}")
        believed, given = self._parts.config.cost, self._parts.given_cost
        remark = mispriced(hello.host, hello.prices, believed=believed, given=given)
        if remark:
            self._tell(remark)
        return Welcome()

    def _refusal(self, hello: HostHello) -> JoinRefused | None:
        """Return the refusal of a host that cannot join, or None if it can."""
        gateway = self._parts.gateway
        known = next(
            (token for token in self._arrivals.tokens if hmac.compare_digest(token.encode(), hello.token.encode())),
            None,
        )
        if known is None or now_s() - self._arrivals.tokens.pop(known) > TOKEN_S:
            why = f"its token is unknown, was used, or is older than {TOKEN_S:g} s"
            return JoinRefused(f"{why}; ask POST /cluster/hosts for one", again=True)
        if not 0 < hello.blocks_total <= _BLOCKS_MAX:
            why = f"its arena has {hello.blocks_total} KV blocks"
            return JoinRefused(f"{why}; give it --kv-blocks 1 to {_BLOCKS_MAX}", again=False)
        if not _HOST_NAME.fullmatch(hello.host):
            return JoinRefused(
                f"{hello.host!r} is no name: give 1 to 64 letters, digits, - and _ with --name", again=False
            )
        if hello.host in self.driver.pools:
            lost_s = _NAME_FREE_RATIO * self._parts.config.hosts.silent_s  # a dead host is noticed within silent_s
            why = f"there is a host {hello.host} already; give another --name"
            return JoinRefused(why, again=True, again_s=lost_s)
        if self.copying.has_copy_of(hello.host):
            return JoinRefused(f"KV of the earlier host {hello.host} is still being released", again=True)
        if gateway.state not in SERVING_STATES:
            return JoinRefused(f"the server is {gateway.state}", again=True)
        if self._parts.config.kv.spill.bytes:
            return JoinRefused("the server has kv.spill, which only its own host can use; remove it there", again=False)
        assert self._form is not None, "a host has a token before any asked for the terms"
        for source, target in ((hello.form, self._form), (self._form, hello.form)):
            result = negotiate(source, target, lossy_allowed=self._parts.config.hosts.lossy)
            if isinstance(result, IncompatibleKV):
                return JoinRefused(result.reason, again=False)
        ours, theirs = self.driver.layout.block_tokens, hello.form.layout.block_tokens
        if theirs % ours:
            why = f"its blocks have {theirs} tokens, which is not a multiple of the server's {ours}"
            return JoinRefused(f"{why}; give it --block-tokens {ours} or a multiple", again=False)
        room_tokens = request_tokens_max(window_of(self._parts.card), hello.blocks_total * theirs, theirs)
        if gateway.state != "loading" and room_tokens is not None and room_tokens < gateway.request_tokens_max:
            most_blocks = -(-gateway.request_tokens_max // theirs)
            why = f"its arena holds {room_tokens} tokens, but requests of up to {gateway.request_tokens_max} are taken"
            return JoinRefused(f"{why}; give it --kv-blocks {most_blocks} or more", again=False)
        return None

    # ---- reports of hosts

    def changed(self) -> None:
        self._changed()

    def connection_ended(self, host: JoinedHost, reason: str) -> None:
        """Handle the end of a connection, whether its host has joined or not."""
        self._arrivals.unauthenticated.discard(host)
        if self._joined.get(host.id) is not host:
            self.driver.wait_timers.reset_timer()
            return
        del self._joined[host.id]
        self._arrivals.without_workers.discard(host.id)
        self._parts.gateway.addresses.pop(host.id, None)
        self._tell(f"{host.id} is lost: {reason}")
        self.driver.lose_host(host.id, f"host {host.id} is lost: {reason}")
        for worker in sorted(host.asked):
            self.driver.lose(worker, f"host {host.id} is lost: {reason}")
        self._parts.gateway.limit_requests()
        self.copying.lose_host(host.id, reason)
        self._movers.pop(host.id, None)
        self.driver.tiers.lose_host(host.id)
        self._parts.metrics.forget_host(host.id)
        self._changed()

    def resize(self, command: StartWorker | RetireWorker | RestartWorker | DismissHost) -> bool:
        """Pass a decision about the fleet to its host. Return False if the host is lost or never started a worker."""
        if isinstance(command, RetireWorker | RestartWorker):
            link = self.driver.links.get(command.worker)
            host = self._joined.get(link.view.host) if link is not None else None
        else:
            host = self._joined.get(command.host)
        if isinstance(command, DismissHost):
            if host is not None:
                host.dismiss("it left, and its requests moved to other hosts")
            return True
        if host is None or (isinstance(command, StartWorker) and not host.has_workers):
            return False
        host.resize(command)
        return True

    async def stop(self) -> None:
        """Disconnect every host, and stop the server's own mover. Save which KV the hosts have."""
        if self._acceptor is not None:
            await self._acceptor.close()
        if self._listening is not None:
            self._listening.close()
        for connection in [*self._arrivals.unauthenticated]:
            connection.dismiss("the server ends")
        tables: dict[str, ArenaTable] = {}
        for host in [*self._joined.values()]:  # no block changes after its table
            table, keep_as = self._kept.table(self.driver.pools[host.id]), secrets.token_hex(16)
            if table is not None:
                tables[keep_as] = table  # new: after another server, the arena has other KV than in an earlier table
            host.dismiss("the server ends", keep_as=keep_as if table is not None else "")
        await asyncio.to_thread(self._kept.save, tables)
        if self._mover is not None:
            await self._mover.stop()

    # ---- the server's own host, and copies

    def _start_own_mover(self, address: str) -> None:
        own, config = self._parts.own, self._parts.config.hosts
        if own is None or self._mover is not None:
            return
        setup = MoverSetup(
            host=own.id,
            arena_bytes=own.arena.bytes_total,
            device=self._parts.computing.device.name,
            layout=self.driver.layout,
            transports=config.transports,
            listen=config.listen or self._parts.config.http.host,
            advertise=config.advertise or address,
            secret=self._mover_secret,
            encrypt=config.encrypt_kv,
        )
        self._mover = MoverSupervisor(setup, own.arena.fd, self, silent_s=config.mover_silent_s, tell=self._tell)
        self.copying.add_host(own.id, self._mover, self.driver.layout)
        self._mover.start()

    def mover_ready(self, host: HostId, generation: int, ready: MoverReady) -> None:
        """Handle a mover that is ready: publish its address, list its tiers, and begin the copies that wait for it."""
        self._parts.gateway.addresses[host] = ready.address
        self._movers[host] = generation
        joined = self._joined.get(host)
        if joined is not None and ready.tiers:
            self.driver.tiers.add_host(host, partial(self._order, joined, host))
        self.copying.mover_ready(host, generation, ready)

    def mover_lost(self, host: HostId, generation: int, reason: str) -> None:
        """Handle the loss of a mover: its transfers and tier orders have failed."""
        self.copying.mover_lost(host, generation, reason)
        if self._movers.get(host) == generation:
            del self._movers[host]
            if host in self._joined:  # tiers of the server's own host do not depend on its mover
                self.driver.tiers.end_all(host)

    def mover_reported(self, host: HostId, generation: int, event: MoverEvent) -> None:
        """Pass on a report of a mover. Drop tier reports of an earlier generation, whose orders have failed already."""
        if not isinstance(event, StoreEvent):
            self.copying.mover_reported(host, generation, event)
        elif self._movers.get(host) == generation:
            self.driver.tiers.handle_event(host, event)

    def _order(self, host: JoinedHost, name: HostId, order: TierOrder) -> bool:
        """Send a tier order to a host's mover. Return False if the mover is not running."""
        generation = self._movers.get(name)
        if generation is None:
            return False
        host.send(generation, order)
        return True


def mispriced(
    host: HostId, prices: Mapping[str, float], *, believed: Mapping[str, Any], given: Mapping[str, Any]
) -> str:
    """Return a warning if a host's predicted step times differ from the server's cost model, else an empty string.

    `prices`: the host's prices in seconds, by the keys of the linear cost model. `believed`: the server's cost model.
    `given`: prices from the server's configuration; their keys are not compared.
    """
    if given.get("model", "linear") != "linear" or "kinds" in given:
        return ""
    pairs = {key: (price, believed[key]) for key, price in prices.items() if key not in given and key in believed}
    wrong = {key: pair for key, pair in pairs.items() if max(pair) > PRICE_FACTOR_MAX * min(pair)}
    if not wrong:
        return ""
    others = ", ".join(f"{key} {theirs:.3g}, not {ours:.3g}" for key, (theirs, ours) in wrong.items())
    section = ", ".join(f"{key} = {theirs:.4g}" for key, (theirs, _) in pairs.items())
    return (
        f"{host} predicts other step times than this server does from its own device: {others}; requests are admitted "
        f"and routed by the server's prediction. If most workers are like those of {host}, start the server with "
        f"cost = {{ {section} }} in its configuration"
    )


def shared_config(parts: Parts) -> Config:
    """Return the configuration for joining hosts: defaults are resolved, settings of the server alone are removed."""
    config, computing = parts.config, parts.computing
    kv = KVConfig(block_tokens=config.kv.block_tokens, allocate=config.kv.allocate, dtype=config.kv.dtype)
    return msgspec.structs.replace(
        config,
        served_name=parts.card.name,
        context_tokens=parts.card.context_tokens,
        dtype=computing.dtype,
        device="cpu",
        models=(),
        cores=0,
        threads=0,
        seed=None,
        log="",
        step_log="",
        topology=type(config.topology)(),
        kv=kv,
        tiers=tuple(tier for tier in config.tiers if is_shared(tier.url)),
        cost=parts.given_cost,
        http=HttpConfig(),
        hooks=HooksConfig(),
        launcher=LauncherConfig(),
    )
