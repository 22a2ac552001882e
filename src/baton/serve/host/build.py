"""Build what one host runs: where it computes, its arena, and what each of its workers will be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.compute.cost_estimates import EngineKind, estimated_costs
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype, kv_dtype, resolve_dtype
from baton.compute.native.build import can_be_built
from baton.compute.native.load_native import native_problem
from baton.compute.ranks.place import rank_problems
from baton.core.config import BatchLimits, Config
from baton.core.errors import ConfigError
from baton.core.types import HostId, WorkerView
from baton.decide.cost.load import inline_files
from baton.decide.kv.layout import KVLayout
from baton.decide.policy.policy_sets import resolve
from baton.move.arena.cuda import CudaArena, create_cuda_arena
from baton.move.arena.memfd import Arena, create_arena
from baton.move.arena.opening import places_of
from baton.move.cores import cpu_quota
from baton.serve.host.device import Device, choose_device, device_room
from baton.serve.host.sizing import blocks_total, host_room, neighbour_cores, share_cores, worker_views
from baton.serve.messages.setup import WorkerSetup

GROWTH_TOKENS_MAX = 2**20
"""More than a request can grow by: its own longest output bounds what it gets."""


@dataclass(frozen=True, slots=True)
class Computing:
    """Where workers compute, in what precision, and how KV lies in a block."""

    device: Device
    dtype: Dtype
    layout: KVLayout
    hash_tokens: int
    """Tokens that each of a request's hashes is of: the blocks of the server, of which a host's are a multiple."""


@dataclass(frozen=True, slots=True)
class HostParts:
    """What a host has before anything runs."""

    id: HostId
    blocks_total: int
    arena: Arena | CudaArena
    setups: list[WorkerSetup]


def choose_computing(config: Config, card: ModelCard, hash_tokens: int | None = None) -> Computing:
    """Resolve what the configuration leaves open. Raises ConfigError where it cannot be had.

    `hash_tokens`: see `Computing`. None: a block's.
    """
    parallel = config.parallel
    device = choose_device(config.device, card, ranks=parallel.tensor * parallel.pipeline)
    dtype = resolve_dtype(config.dtype, "cuda" if device.drivers else "cpu", config.weights)
    layout = card.layout(
        block_tokens=config.kv.block_tokens,
        dtype=kv_dtype(card, config.kv.dtype, dtype),
        tensor_parallel=parallel.tensor,
        pipeline_parallel=parallel.pipeline,
    )
    problems = rank_problems(card, layout, config.weights)
    if problems:
        raise ConfigError("\n".join(problems))
    return Computing(device, dtype, layout, hash_tokens or layout.block_tokens)


def priced(config: Config, card: ModelCard, computing: Computing) -> Config:
    """Fill in what `cost` leaves open: the prices of steps of this model on the engine that is expected to serve it.

    One that names another cost model than the linear one stays, with what its files say. Prices are those of a worker
    of the topology.
    """
    if config.cost.get("model", "linear") != "linear" or "kinds" in config.cost:
        return msgspec.structs.replace(config, cost=inline_files(config.cost, folder=Path()))
    return msgspec.structs.replace(config, cost={**device_prices(config, card, computing), **config.cost})


def device_prices(config: Config, card: ModelCard, computing: Computing) -> dict[str, float]:
    """What a step of this model is expected to cost a worker of this host's topology: keys of the linear model."""
    workers = len(worker_views(config.topology, HostId("")))
    threads = share_cores(workers, config.threads, cpu_quota())[0][0] if workers else 1
    return estimated_costs(
        card,
        kind=_engine_kind(card, computing),
        dtype=computing.dtype,
        weights=config.weights,
        threads=threads,
        kv_token_bytes=computing.layout.token_bytes,
    )


def _engine_kind(card: ModelCard, computing: Computing) -> EngineKind:
    """Say which engine is expected to serve, as `choose_engine` finds it. Nothing is built here: it takes seconds."""
    if computing.device.drivers:
        return "cuda"
    refusal = native_problem(card, computing.layout, computing.device.name)
    return "native" if not refusal and can_be_built() else "torch"


def limit_context(config: Config, card: ModelCard) -> ModelCard:
    """Apply the name and the context length that the configuration wants. Raises ConfigError where it is too long."""
    name = config.served_name or card.name
    context_tokens = config.context_tokens or card.context_tokens
    if context_tokens > card.context_tokens:
        raise ConfigError(
            f"context_tokens is {context_tokens}, but {card.name} was trained for {card.context_tokens}; give less"
        )
    return msgspec.structs.replace(card, name=name, context_tokens=context_tokens)


def build_host(config: Config, card: ModelCard, computing: Computing, host: HostId, prefix: str = "") -> HostParts:
    """Reserve the arena and describe the workers; start nothing. Raises ConfigError and ArenaError.

    `prefix` begins the names of the workers: those of another host than the server's own have one.
    """
    drivers, layout = computing.device.drivers, computing.layout
    room = device_room(drivers, config.topology, card, layout) if drivers else host_room()
    total = blocks_total(config, card, layout, room)
    if drivers:
        arena = create_cuda_arena(places_of(drivers, layout, total))
    else:
        arena = create_arena(total * layout.block_bytes)
    views = worker_views(config.topology, host, prefix)
    return HostParts(host, total, arena, _setups(config, card, computing, views, total))


def batch_limits(config: Config) -> BatchLimits:
    """Bound a worker's batch. Blocks for the longest output are growth that is asked for once."""
    if config.kv.allocate == "on_demand":
        return config.batch
    return msgspec.structs.replace(config.batch, growth_tokens=GROWTH_TOKENS_MAX)


def _setups(
    config: Config, card: ModelCard, computing: Computing, bare_views: Sequence[WorkerView], blocks: int
) -> list[WorkerSetup]:
    limits, layout, policy = batch_limits(config), computing.layout, resolve(config.policy)
    views = [
        msgspec.structs.replace(
            view,
            kv_tokens_max=blocks * layout.block_tokens,
            step_tokens_max=limits.step_tokens_max,
            requests_max=limits.requests_max,
        )
        for view in bare_views
    ]
    shares = share_cores(len(views), config.threads, cpu_quota())
    guests = neighbour_cores(shares) if config.idle_cores == "lend" else [()] * len(shares)
    return [
        WorkerSetup(
            view=view,
            card=card,
            layout=layout,
            hash_tokens=computing.hash_tokens,
            arena_bytes=blocks * layout.block_bytes,
            dtype=computing.dtype,
            weights=config.weights,
            device=computing.device.name,
            threads=threads,
            cores=cores,
            guest_cores=guest_cores,
            limits=limits,
            batching=policy.batching,
            fairness=policy.fairness,
            speculation=config.speculation,
            cost=config.cost,
            step_log=config.step_log,
            log_bytes_max=config.log_bytes_max,
        )
        for view, (threads, cores), guest_cores in zip(views, shares, guests, strict=True)
    ]
