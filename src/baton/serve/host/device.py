"""Choose the device of the workers and the memory for its KV cache, without loading PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from baton.compute.decode_sizes import workspace_bytes
from baton.compute.models.card import ModelCard
from baton.core.config import DEVICE, Topology
from baton.core.errors import ConfigError
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda_driver import LIBRARY, CudaDriver, CudaUnavailableError
from baton.serve.host.sizing import MemoryBudget

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
