"""The agent of a remote host: join a server, and join again after the server was unreachable."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from baton.compute.models.resolve import resolve_model
from baton.core.config import Config, ParallelConfig, Topology
from baton.core.errors import ConfigError
from baton.core.kv_config import KVConfig, KVDtypeChoice, TierConfig
from baton.core.types import HostId
from baton.move.backoff import Backoff
from baton.move.clock import now_s
from baton.serve.host.build import choose_computing, limit_context, priced
from baton.serve.host.join_request import JoinFailedError, find_server, request_terms, server_address
from baton.serve.host.membership import HostAddress, KeptArena, Membership
from baton.serve.host.tasks import run_in_thread
from baton.serve.messages.hosting import HostTerms

_BACKOFF = Backoff(0.2, 6.4)
_REJOIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of `baton host`. All other configuration comes from the server."""

    url: str
    name: str
    model: str
    """Model to load. Empty: the server's; its name or path must resolve on this host too."""
    topology: Topology
    tensor: int | None
    pipeline: int | None
    """Tensor-parallel ranks and pipeline stages of each worker. None: as on the server."""
    device: str
    """Device of this host's workers, with the values of `Config.device`. The server's device is ignored."""
    kind: str
    """Kind of its workers in the server's `cost.kinds`. Empty: the first."""
    threads: int
    kv_blocks: int
    """Blocks in the arena. 0: chosen from the free memory."""
    block_tokens: int
    """Tokens per block: a multiple of the server's block size. 0: the server's block size."""
    kv_dtype: KVDtypeChoice | None
    """Data type of KV. None: as on the server."""
    tiers: tuple[TierConfig, ...]
    """Tiers that only this host uses. They are searched before the tiers that the server shares."""
    listen: str
    advertise: str
    api_key: str | None
    join_wait_s: float
    """Seconds of failed attempts to join, after which the agent ends."""


class Agent:
    """Keep this host joined to a server, until a signal arrives or joining has failed for `join_wait_s`."""

    def __init__(self, options: HostOptions, *, tell: Callable[[str], None]) -> None:
        self._options = options
        self._tell = tell
        self._stopped = asyncio.Event()
        self._staying: asyncio.Task[str] | None = None
        self._membership: Membership | None = None
        """None: the server's terms and the model are not known yet."""
        self._kept: KeptArena | None = None
        """The arena of the last membership, if the next server will know its KV."""

    @property
    def restarts(self) -> bool:
        """Whether an operator wants this process to start its program again."""
        return self._membership is not None and self._membership.restarts and not self._stopped.is_set()

    async def run(self) -> int:
        """Run until the host ends. Return the exit code.

        0: a signal or an operator of the server ended it. 1: joining failed, or no worker can be kept alive.

        Raises ConfigError or ModelError if another attempt to join cannot succeed.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        gone_s, failures, said, said_s = now_s(), 0, "", now_s()
        while not self._stopped.is_set():
            self._staying = asyncio.create_task(self._stay())
            try:
                reason = await self._staying
            except asyncio.CancelledError:
                if not self._stopped.is_set():
                    raise  # not cancelled by `_on_signal`, but from outside
                break
            except JoinFailedError as error:
                if self._stopped.is_set():
                    break
                failures += 1
                is_new, said = str(error) != said, str(error)
                said_s = now_s() if is_new else said_s
                left_s = min(gone_s + self._options.join_wait_s, said_s + error.again_s) - now_s()
                if left_s < 0:
                    self._tell(f"given up after {now_s() - gone_s:.0f} s: {error}")
                    return 1
                if is_new:
                    self._tell(f"{error}; trying again for {left_s:.0f} s")
                await self._pause(min(_BACKOFF.pause_s(failures), left_s))
                continue
            if self._membership is not None and self._membership.failure:
                return 1
            if self._membership is not None and self._membership.is_leaving:
                return 0
            gone_s, failures, said = now_s(), 0, ""
            if not self._stopped.is_set():
                self._tell(f"this host has left the cluster: {reason}; all its workers have ended; joining again")
                await self._pause(_REJOIN_S)
        return 0

    async def _stay(self) -> str:
        self._membership, options = None, self._options
        url = await run_in_thread(partial(find_server, options.url))
        server = server_address(url)
        terms = await run_in_thread(partial(request_terms, url, options.api_key))
        config = _config(terms, options)
        if problems := config.kind_problems():
            raise ConfigError(f"--{problems[0]} (in the server's configuration)")
        resolved = partial(resolve_model, config.model, config.load_format, config.adapter)
        card = limit_context(config, await run_in_thread(resolved))
        address = HostAddress(
            host=HostId(options.name),
            server=server,
            port=terms.port,
            token=terms.token,
            tls=terms.tls,
            mover_secret=terms.mover_secret,
            listen=options.listen,
            advertise=options.advertise,
        )
        computing = choose_computing(config, card, terms.config.kv.block_tokens)
        self._membership = Membership(priced(config, card, computing), card, computing, self._tell, self._kept)
        try:
            return await self._membership.join_and_serve(address)
        finally:
            self._kept = self._membership.kept

    async def _pause(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), pause_s)

    def _on_signal(self) -> None:
        self._stopped.set()
        if self._membership is not None:
            self._membership.leave("the agent was told to end")
        elif self._staying is not None:
            self._staying.cancel()


def _config(terms: HostTerms, options: HostOptions) -> Config:
    """Return the server's configuration with this host's options in place."""
    kv = msgspec.structs.asdict(terms.config.kv) | {"blocks": options.kv_blocks}
    if options.block_tokens:
        kv["block_tokens"] = options.block_tokens
    if options.kv_dtype is not None:
        kv["dtype"] = options.kv_dtype
    parallel = terms.config.parallel
    if options.tensor and options.tensor != parallel.tensor:  # divisions of the server's ranks do not fit others
        several = options.tensor > 1
        parallel = ParallelConfig(
            tensor=options.tensor,
            pipeline=parallel.pipeline,
            experts=parallel.experts and several,
            overlap_tokens_min=parallel.overlap_tokens_min if several else 0,
        )
    return msgspec.structs.replace(
        terms.config,
        model=options.model or terms.config.model,
        served_name="" if options.model else terms.config.served_name,  # for log lines: clients see the server's name
        topology=options.topology,
        parallel=msgspec.structs.replace(parallel, pipeline=options.pipeline or terms.config.parallel.pipeline),
        device=options.device,
        kind=options.kind,
        threads=options.threads,
        kv=KVConfig(**kv),
        tiers=(*options.tiers, *terms.config.tiers),
    )
