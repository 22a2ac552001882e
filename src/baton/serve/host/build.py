"""Build the parts of one host: its device, its arena, and the setup message of each worker."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec

from baton.compute.attention_choice import attention_problem, flex_arena_problem
from baton.compute.cost_estimates import EngineKind, estimated_costs, weights_bytes
from baton.compute.decode_sizes import workspace_bytes
from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype, Precision, kv_dtype, phase_precisions, resolve_dtype
from baton.compute.native.build import build_problem
from baton.compute.native.load_native import native_problem
from baton.compute.ranks.place import data_problems, expert_problems, rank_problems
from baton.core.config import DEVICE, AttentionName, BatchLimits, Config, Topology, WeightsChoice
from baton.core.errors import ConfigError
from baton.core.types import HostId, WorkerView
from baton.decide.cost.load import inline_files
from baton.decide.kv.layout import KVLayout
from baton.decide.policy.policy_sets import resolve
from baton.move.arena.cuda import CudaArena, create_cuda_arena
from baton.move.arena.cuda_driver import LIBRARY, CudaDriver, CudaUnavailableError
from baton.move.arena.memfd import Arena, create_arena
from baton.move.arena.opening import places_of
from baton.move.cores import cpu_quota, own_cores
from baton.move.weights_file import can_share_weights
from baton.serve.host.sizing import (
    HostShare,
    MemoryBudget,
    blocks_total,
    divide_cores,
    host_budget,
    neighbour_cores,
    share_cores,
    worker_views,
    workers_max,
)
from baton.serve.messages.setup import WorkerSetup

GROWTH_TOKENS_MAX = 2**20
"""Allocation step without on-demand allocation. No output is longer, so a request gets all its blocks at once."""


@dataclass(frozen=True, slots=True)
class Computing:
    """Device and precision of the workers, and the layout of KV in a block."""

    device: Device
    dtype: Dtype
    layout: KVLayout
    hash_tokens: int
    """Tokens per block hash: the server's block size. A host's block size is a multiple of it."""
    share: HostShare
    """Cores and memory of this host for the workers."""
    phases: Mapping[str, Precision] = field(default_factory=dict[str, Precision])
    """Precision of workers by the role that they start in. Empty: all compute in `dtype`."""
    attention_backend: AttentionName = "auto"
    weights: WeightsChoice = "dense"
    """Format of the weights of workers whose role has no precision in `phases`."""

    @property
    def precision_key(self) -> str:
        """Text that differs between workers with different KV."""
        phases = [f"{role} {phase.dtype} {phase.weights}" for role, phase in self.phases.items()]
        return ", ".join(phases) or (self.dtype if self.weights == "dense" else f"{self.dtype} {self.weights}")


@dataclass(frozen=True, slots=True)
class HostArena:
    """A host's arena. It may outlive the host's membership in a cluster."""

    id: str
    """32 hexadecimal digits, drawn at random."""
    bytes: Arena | CudaArena
    blocks_total: int


@dataclass(frozen=True, slots=True)
class HostParts:
    """A host's arena and the setups of its workers, before any process runs."""

    id: HostId
    arena_id: str
    blocks_total: int
    arena: Arena | CudaArena
    setups: list[WorkerSetup]
    workers_max: int
    """Maximum number of workers that scaling may run here."""
    spill_fd: int | None = None
    """Descriptor of the spill space. None: there is none."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that every worker gets: of the arena, then of the spill space if there is one."""
        return (self.arena.fd,) if self.spill_fd is None else (self.arena.fd, self.spill_fd)


def choose_computing(
    config: Config, card: ModelCard, hash_tokens: int | None = None, share: HostShare | None = None
) -> Computing:
    """Choose device, precision and KV layout from the configuration. Raises ConfigError if this host cannot use them.

    `hash_tokens`: tokens per block hash. None: the block size. `share`: part of the host. None: `config.cores` of it.
    """
    parallel = config.parallel
    device = choose_device(config.device, card, ranks=parallel.tensor * parallel.pipeline)
    kind = "cuda" if device.drivers else "cpu"
    dtype, phases = resolve_dtype(config.dtype, kind, config.weights), phase_precisions(config, kind)
    layout = card.layout(
        block_tokens=config.kv.block_tokens,
        dtype=kv_dtype(card, config.kv.dtype, phases["decode"].dtype if phases else dtype),
        tensor_parallel=parallel.tensor,
        pipeline_parallel=parallel.pipeline,
        context_parallel=parallel.context,
        data_parallel=parallel.data,
    )
    weights = {config.weights, *(phase.weights for phase in phases.values())}
    problems = [
        problem for each in sorted(weights) for problem in rank_problems(card, layout, each, config.attention_backend)
    ]
    problems += data_problems(layout, device.name, experts=parallel.experts)
    problems += expert_problems(card, layout) if parallel.experts else []
    if parallel.overlap_tokens_min and parallel.tensor == 1:
        problems.append("--enable-dbo (parallel.overlap_tokens_min) overlaps tensor ranks, and there is 1: add --tp N")
    problems = list(dict.fromkeys(problems)) or layout.problems()
    if problems:
        raise ConfigError("\n".join(problems))
    if share is None:
        share = HostShare(cores=divide_cores([config.cores], own_cores())[0])
    hash_tokens = hash_tokens or layout.block_tokens
    return Computing(device, dtype, layout, hash_tokens, share, phases, config.attention_backend, config.weights)


def priced(config: Config, card: ModelCard, computing: Computing) -> Config:
    """Return the configuration with estimates for the missing prices of the linear cost model.

    The values of other cost models do not change; the contents of their files are read in.
    """
    if config.cost.get("model", "linear") != "linear" or "kinds" in config.cost:
        return msgspec.structs.replace(config, cost=inline_files(config.cost, folder=Path()))
    if not computing.phases:
        return msgspec.structs.replace(config, cost={**device_prices(config, card, computing), **config.cost})
    kinds = {
        role: {**device_prices(config, card, computing, phase), **config.cost}
        for role, phase in computing.phases.items()
    }
    return msgspec.structs.replace(config, cost={"kinds": kinds})


def device_prices(
    config: Config, card: ModelCard, computing: Computing, precision: Precision | None = None
) -> dict[str, float]:
    """Estimate the prices of a step on one worker of the topology. The keys are those of the linear cost model.

    `precision`: of that worker. None: that of the configuration.
    """
    precision = precision or Precision(computing.dtype, config.weights)
    workers = len(worker_views(config.topology, HostId("")))
    shares = share_cores(workers, config.threads, cpu_quota(), computing.share.cores) if workers else [(1, ())]
    return estimated_costs(
        card,
        kind=_engine_kind(card, computing, precision.weights),
        dtype=precision.dtype,
        weights=precision.weights,
        threads=shares[0][0],
        kv_token_bytes=computing.layout.token_bytes,
    )


def _engine_kind(card: ModelCard, computing: Computing, weights: WeightsChoice) -> EngineKind:
    """Predict the engine that `choose_engine` will pick. Compiling the native engine to find out would take 30 s."""
    if computing.device.drivers:
        return "cuda"
    refusal = native_problem(card, computing.layout, computing.device.name)
    is_asked = computing.attention_backend in ("auto", "native") and weights != "fp8"
    is_native = is_asked and not refusal and not build_problem()
    return "native" if is_native else "torch"


def shares_weights(card: ModelCard, computing: Computing) -> bool:
    """Return whether all workers of a host map one copy of the weights."""
    forms = {phase.weights for phase in computing.phases.values()} or {computing.weights}
    return all(_engine_kind(card, computing, form) == "native" for form in forms) and can_share_weights()


def limit_context(config: Config, card: ModelCard) -> ModelCard:
    """Return the card with the configured name and context. Raises ConfigError if the model has a shorter context."""
    name = config.served_name or card.name
    context_tokens = config.context_tokens or card.context_tokens
    if context_tokens > card.context_tokens:
        raise ConfigError(
            f"context_tokens is {context_tokens}, but {card.name} was trained for {card.context_tokens}; give less"
        )
    return msgspec.structs.replace(card, name=name, context_tokens=context_tokens)


def build_host(
    config: Config,
    card: ModelCard,
    computing: Computing,
    host: HostId,
    prefix: str = "",
    kept: HostArena | None = None,
) -> HostParts:
    """Build a host's arena and its workers' setups, but start no process. Raises ConfigError or ArenaError.

    `prefix` starts the names of the host's workers. It is empty on the server's own host. `kept`: the arena of an
    earlier membership with the same model and layout. None: a new arena is reserved.
    """
    _check_engine(config, card, computing)
    arena = kept or _reserve_arena(config, card, computing)
    drivers, total = computing.device.drivers, arena.blocks_total
    views = worker_views(config.topology, host, prefix)
    setups = _setups(config, card, computing, views, total)
    used = {setup.precision for setup in setups}
    weights = [weights_bytes(card, precision.dtype, precision.weights) for precision in used]
    is_shared = shares_weights(card, computing)
    most = workers_max(
        len(setups),
        cores=len(computing.share.cores),
        threads=setups[0].threads,
        worker_bytes=0 if is_shared else max(weights),
        shared_bytes=arena.bytes.bytes_total + (sum(weights) if is_shared else 0),
        is_on_gpu=bool(drivers),
    )
    return HostParts(host, arena.id, total, arena.bytes, setups, most)


def _check_engine(config: Config, card: ModelCard, computing: Computing) -> None:
    """Raise ConfigError if a worker could not load its engine. Checked before any worker starts."""
    precisions = list(computing.phases.values()) or [Precision(computing.dtype, config.weights)]
    device, attention = computing.device.name, computing.attention_backend
    problems = [attention_problem(card, computing.layout, device, attention, each) for each in precisions]
    if found := list(dict.fromkeys(filter(None, problems))):
        raise ConfigError("\n".join(found))


def _reserve_arena(config: Config, card: ModelCard, computing: Computing) -> HostArena:
    drivers, layout = computing.device.drivers, computing.layout
    requests_max = config.batch.requests_max
    if drivers:
        budget = device_budget(drivers, config.topology, _as_held(card, computing), layout, requests_max)
    else:
        budget = host_budget(computing.share.pledged_bytes)
    total = blocks_total(config, card, layout, budget)
    if config.attention_backend == "flex" and (problem := flex_arena_problem(layout, total, computing.device.name)):
        raise ConfigError(problem)
    if drivers:
        arena = create_cuda_arena(places_of(drivers, layout, total))
    else:
        arena = create_arena(total * layout.block_bytes)
    return HostArena(secrets.token_hex(16), arena, total)


def _as_held(card: ModelCard, computing: Computing) -> ModelCard:
    """Return the card with the bytes that weights take on a GPU, where every worker holds them in fp8."""
    used = computing.phases.values() or [Precision(computing.dtype, computing.weights)]
    if any(precision.weights != "fp8" for precision in used):
        return card
    held_bytes = max(weights_bytes(card, precision.dtype, "fp8") for precision in used)
    return msgspec.structs.replace(card, weight_bytes=held_bytes, format="safetensors")


def batch_limits(config: Config) -> BatchLimits:
    """Return batch limits. Without on-demand allocation, a request gets all blocks of its longest output at once."""
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
            kind=view.role if computing.phases else config.kind,
        )
        for view in bare_views
    ]
    shares = share_cores(len(views), config.threads, cpu_quota(), computing.share.cores)
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
            phases=dict(computing.phases),
            attention_backend=config.attention_backend,
            parallel=config.parallel,
            device=computing.device.name,
            threads=threads,
            cores=cores,
            guest_cores=guest_cores,
            limits=limits,
            batching=policy.batching,
            fairness=policy.fairness,
            speculation=config.speculation,
            sandbox=config.sandbox,
            cost=config.cost,
            step_log=config.step_log,
            log_bytes_max=config.log_bytes_max,
        )
        for view, (threads, cores), guest_cores in zip(views, shares, guests, strict=True)
    ]


CUDA_WORKER_BYTES = 2 * 2**30
"""Device memory of a worker's CUDA context and of a step's activations."""


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    """`cpu`, or `cuda:N` for the first rank; further ranks use the following GPUs."""
    drivers: tuple[CudaDriver, ...] = ()
    """Open driver of each rank's GPU. Empty: the workers compute on the CPU."""


def choose_device(choice: str, card: ModelCard, *, ranks: int = 1, library: str = LIBRARY) -> Device:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:N`; `auto` is the first GPU that PyTorch can use, otherwise the CPU.

    Raises ConfigError if a requested GPU is not available; the message names the missing part.
    """
    match = DEVICE.fullmatch(choice)
    assert match is not None, f"{choice!r} was checked with the configuration"
    if choice == "cpu" or (choice == "auto" and card.format == "hash"):
        return Device("cpu")
    if card.format == "hash":
        raise ConfigError(f"--device is {choice}, but the hash model computes on the CPU only; leave it out")
    index = int(match[1] or 0)
    try:
        _check_torch()
        return open_devices(index, ranks, library)
    except CudaUnavailableError as error:
        if choice == "auto":
            return Device("cpu")
        raise ConfigError(f"--device is {choice}, but {error}; use --device cpu") from error


def open_devices(first: int, ranks: int, library: str = LIBRARY) -> Device:
    """Open a GPU for each rank, beginning with `cuda:first`.

    Raises CudaUnavailableError if the first GPU does not exist, ConfigError if there are fewer GPUs than ranks.
    """
    drivers = [CudaDriver(first, library)]
    seen = drivers[0].device_count
    if seen < first + ranks:
        raise ConfigError(
            f"{ranks} ranks from cuda:{first} on need a GPU each, and the driver sees {seen} in all;"
            " give --tp and --pp that are fewer ranks, or use --device cpu"
        )
    drivers += (CudaDriver(first + rank, library) for rank in range(1, ranks))
    return Device(f"cuda:{first}", tuple(drivers))


def _check_torch() -> None:
    """Raise CudaUnavailableError if PyTorch was built without CUDA: its version ends with `+cpu`."""
    version = metadata.version("torch")
    if version.endswith("+cpu"):
        raise CudaUnavailableError(f"torch {version} is a build for CPUs; install one with CUDA")


def device_budget(
    drivers: Sequence[CudaDriver], topology: Topology, card: ModelCard, layout: KVLayout, requests_max: int
) -> MemoryBudget:
    """Return the GPU memory that all workers together leave free for KV. By default the arena takes nine tenths of it.

    A worker needs its weights, the partial results of its largest decode step, and a constant.

    Each GPU holds its rank's part of weights and blocks, so the GPU with the least free memory limits all. Quantized
    weights are expanded to bfloat16, so 4-bit weights take four times their size.
    """
    weights_bytes = card.weight_bytes * (4 if card.format == "gguf" else 1) // layout.ranks
    workers = max(2 if topology == Topology() else 0, topology.prefill + topology.decode + topology.mixed)
    worker_bytes = weights_bytes + CUDA_WORKER_BYTES + workspace_bytes(card, layout, requests_max)
    rooms: list[int] = []
    for driver, shard in zip(drivers, layout.shards, strict=True):
        free_bytes = max(0, driver.free_bytes() - workers * worker_bytes)
        rooms.append(free_bytes * layout.block_bytes // shard.size_bytes)
    free_bytes = min(rooms)
    return MemoryBudget(free_bytes=free_bytes, wanted_bytes=free_bytes, most_bytes=free_bytes * 9 // 10)
