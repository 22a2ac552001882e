"""Build the parts of one host's server: everything that decides, the arena, and what each worker will be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.arena.cuda import CudaArena, create_cuda_arena
from baton.arena.memfd import Arena, create_arena
from baton.control.build import build_coordinator
from baton.control.decision_log import LogHeader
from baton.core.config import BatchLimits, Config, Plugin
from baton.core.errors import ConfigError
from baton.core.plugin import load_plugin
from baton.core.types import HostId, Slo
from baton.cost.load import load_cost
from baton.engine.card import ModelCard
from baton.engine.dtype import Dtype, kv_dtype, resolve_dtype
from baton.kv.blocks import EvictionOrder
from baton.kv.host_pool import HostPool
from baton.kv.layout import KVLayout
from baton.link.log_file import LogWriter
from baton.link.setup import WorkerSetup
from baton.metrics.registry import Metrics
from baton.policy.batching import BatchingPolicy
from baton.policy.named import plugin_names, resolve
from baton.server.device import choose_device, device_room
from baton.server.driver import Driver
from baton.server.gateway import LiveGateway
from baton.server.hooks import Hooks, load_hooks
from baton.server.host import blocks_total, host_room, share_cores, worker_views
from baton.server.recorder import Recorder

HOST = HostId("host-0")
GROWTH_TOKENS_MAX = 2**20
"""More than a request can grow by: its own longest output bounds what it gets."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server consists of before anything runs."""

    config: Config
    card: ModelCard
    driver: Driver
    gateway: LiveGateway
    metrics: Metrics
    hooks: Hooks
    arena: Arena | CudaArena
    setups: list[WorkerSetup]


@dataclass(frozen=True, slots=True)
class Computed:
    """Where workers compute, and in what precision."""

    device: str
    dtype: Dtype


def assemble(config: Config, card: ModelCard) -> Parts:
    """Build everything that decides, and the arena; start nothing. Raises ConfigError and ArenaError."""
    config = msgspec.structs.replace(config, policy=resolve(config.policy))
    _check_batching(config.policy.batching)
    device = choose_device(config.device, card)
    dtype = resolve_dtype(config.dtype, "cpu" if device.driver is None else "cuda", config.weights)
    layout = card.layout(block_tokens=config.kv.block_tokens, dtype=kv_dtype(card, config.kv.dtype, dtype))
    card = _limit_context(config, card)
    room = host_room() if device.driver is None else device_room(device.driver, config.topology, card)
    total = blocks_total(config, card, layout, room)
    pool = HostPool(
        host=HOST,
        blocks_total=total,
        block_tokens=layout.block_tokens,
        eviction=lambda: load_plugin(config.policy.eviction.use, config.policy.eviction.options, expects=EvictionOrder),
    )
    attempts_max = config.survival.attempts_max
    cost = load_cost(config.cost, folder=Path()).cost
    coordinator = build_coordinator(
        config.policy, cost=cost, block_tokens=layout.block_tokens, attempts_max=attempts_max
    )
    metrics = Metrics()
    driver = Driver(coordinator, pool, layout, Recorder(metrics))
    gateway = LiveGateway(card, driver, policy_names=plugin_names(config.policy), slo=_promise(config))
    hooks = load_hooks(config.hooks)
    if config.log:
        header = LogHeader(
            policy=config.policy, block_tokens=layout.block_tokens, attempts_max=attempts_max, cost=config.cost
        )
        driver.log = LogWriter(Path(config.log), header, config.log_bytes_max)
    bytes_total = total * layout.block_bytes
    arena = create_arena(bytes_total) if device.driver is None else create_cuda_arena(device.driver, bytes_total)
    setups = _setups(config, card, layout, bytes_total, Computed(device.name, dtype))
    return Parts(config, card, driver, gateway, metrics, hooks, arena, setups)


def _check_batching(plugin: Plugin) -> None:
    """Make the workers' batching once, so that a wrong one is told here and not by workers that die of it.

    Raises ConfigError: show it and exit with code 2.
    """
    load_plugin(plugin.use, plugin.options, expects=BatchingPolicy)


def _limit_context(config: Config, card: ModelCard) -> ModelCard:
    name = config.served_name or card.name
    context_tokens = config.context_tokens or card.context_tokens
    if context_tokens > card.context_tokens:
        raise ConfigError(
            f"context_tokens is {context_tokens}, but {card.name} was trained for {card.context_tokens}; give less"
        )
    return msgspec.structs.replace(card, name=name, context_tokens=context_tokens)


def _promise(config: Config) -> Slo | None:
    slo = config.slo
    if slo.ttft_s is None or slo.tpot_s is None:
        return None
    return Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)


def _limits(config: Config) -> BatchLimits:
    """Bound a worker's batch. Blocks for the longest output are growth that is asked for once."""
    if config.kv.allocate == "on_demand":
        return config.batch
    return msgspec.structs.replace(config.batch, growth_tokens=GROWTH_TOKENS_MAX)


def _setups(
    config: Config, card: ModelCard, layout: KVLayout, arena_bytes: int, computed: Computed
) -> list[WorkerSetup]:
    limits = _limits(config)
    kv_tokens = arena_bytes // layout.block_bytes * layout.block_tokens
    views = [
        msgspec.structs.replace(
            view,
            kv_tokens_max=kv_tokens,
            step_tokens_max=limits.step_tokens_max,
            requests_max=limits.requests_max,
        )
        for view in worker_views(config.topology, HOST)
    ]
    shares = share_cores(len(views), config.threads)
    return [
        WorkerSetup(
            view=view,
            card=card,
            layout=layout,
            arena_bytes=arena_bytes,
            dtype=computed.dtype,
            weights=config.weights,
            device=computed.device,
            threads=threads,
            cores=cores,
            limits=limits,
            batching=config.policy.batching,
            fairness=config.policy.fairness,
            speculation=config.speculation,
            cost=config.cost,
        )
        for view, (threads, cores) in zip(views, shares, strict=True)
    ]
