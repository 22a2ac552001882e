"""The agent of a host: joins a server, and joins again when that was gone for a while."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton.compute.models.resolve import resolve_model
from baton.core.config import Config, KVConfig, KVDtypeChoice, ParallelConfig, TierConfig, Topology
from baton.core.types import HostId
from baton.move.clock import now_s
from baton.serve.host.ask import NotNowError, ask_terms, server_address
from baton.serve.host.build import choose_computing, limit_context, priced
from baton.serve.host.membership import Membership, Place
from baton.serve.messages.hosting import HostTerms

_PAUSE_S = 0.1
_DOUBLINGS_MAX = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What the person who starts an agent wants. Everything else comes from the server."""

    url: str
    name: str
    model: str
    """Empty: what the server calls it, which has to be found under that name here."""
    topology: Topology
    tensor: int | None
    pipeline: int | None
    """Ranks and stages of each worker. None: as the server's workers."""
    device: str
    """As `Config.device`: the server says nothing about it."""
    threads: int
    kv_blocks: int
    """0 chooses."""
    block_tokens: int
    """0: as the server's. Else a multiple of that."""
    kv_dtype: KVDtypeChoice | None
    """None: as the server's."""
    tiers: tuple[TierConfig, ...]
    """Below this host's arena, before those that it shares with the server."""
    listen: str
    advertise: str
    api_key: str | None
    join_wait_s: float
    """How long to go on asking a server that is not there."""


class Agent:
    """Runs one stay after the other, until a signal comes or the server is gone for too long."""

    def __init__(self, wishes: HostOptions, *, tell: Callable[[str], None]) -> None:
        self._wishes = wishes
        self._tell = tell
        self._stopped = asyncio.Event()
        self._membership: Membership | None = None

    async def run(self) -> int:
        """Serve. Returns the exit code: 0 after a signal, 1 where there is no server or no worker lives.

        Raises ConfigError and ModelError where the server refuses us for good, or our side cannot be had.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        gone_s, failures, said = now_s(), 0, ""
        while not self._stopped.is_set():
            try:
                reason = await self._stay()
            except NotNowError as error:
                failures += 1
                left_s = gone_s + self._wishes.join_wait_s - now_s()
                if left_s < 0:
                    self._tell(f"given up after {self._wishes.join_wait_s:.0f} s: {error}")
                    return 1
                if str(error) != said:
                    said = str(error)
                    self._tell(f"{error}; trying again for {left_s:.0f} s")
                await self._pause(_PAUSE_S * 2 ** min(failures, _DOUBLINGS_MAX))
                continue
            if self._membership is not None and self._membership.failure:
                return 1
            gone_s, failures, said = now_s(), 0, ""
            if not self._stopped.is_set():
                self._tell(f"out of the cluster: {reason}; every worker has ended, joining again")
                await self._pause(_PAUSE_S)
        return 0

    async def _stay(self) -> str:
        wishes = self._wishes
        server = server_address(wishes.url)
        terms = await asyncio.to_thread(ask_terms, wishes.url, wishes.api_key)
        config = _config(terms, wishes)
        card = limit_context(config, await asyncio.to_thread(resolve_model, config.model))
        place = Place(
            host=HostId(wishes.name),
            server=server,
            port=terms.port,
            token=terms.token,
            listen=wishes.listen,
            advertise=wishes.advertise,
        )
        computing = choose_computing(config, card, terms.config.kv.block_tokens)
        self._membership = Membership(priced(config, card, computing), card, computing, self._tell)
        if self._stopped.is_set():
            return "a signal came"
        return await self._membership.stay(place)

    async def _pause(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), pause_s)

    def _on_signal(self) -> None:
        self._stopped.set()
        if self._membership is not None:
            self._membership.leave("the agent was told to end")


def _config(terms: HostTerms, wishes: HostOptions) -> Config:
    """The server's configuration, with what is this host's own."""
    kv = msgspec.structs.asdict(terms.config.kv) | {"blocks": wishes.kv_blocks}
    if wishes.block_tokens:
        kv["block_tokens"] = wishes.block_tokens
    if wishes.kv_dtype is not None:
        kv["dtype"] = wishes.kv_dtype
    return msgspec.structs.replace(
        terms.config,
        model=wishes.model or terms.config.model,
        served_name="" if wishes.model else terms.config.served_name,  # its own one, for messages: nobody asks here
        topology=wishes.topology,
        parallel=ParallelConfig(
            tensor=wishes.tensor or terms.config.parallel.tensor,
            pipeline=wishes.pipeline or terms.config.parallel.pipeline,
        ),
        device=wishes.device,
        threads=wishes.threads,
        kv=KVConfig(**kv),
        tiers=(*wishes.tiers, *terms.config.tiers),
    )
