"""Choose where the models compute, without loading PyTorch, and how much memory there is for the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from baton.compute.models.card import ModelCard
from baton.core.config import DEVICE, Topology
from baton.core.errors import ConfigError
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda_driver import LIBRARY, CudaDriver, CudaUnavailableError
from baton.serve.host.sizing import Room

CUDA_WORKER_BYTES = 2 * 2**30
"""Of device memory that a worker takes beside weights and KV: its context, and a step's scratch memory."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where workers compute. The driver is open where that is a GPU."""

    name: str
    """`cpu`, or `cuda:N`: that of the first rank; the others have the next ones."""
    drivers: tuple[CudaDriver, ...] = ()
    """Of each rank's device. Empty: they compute on the CPU."""


def choose_device(choice: str, card: ModelCard, *, ranks: int = 1, library: str = LIBRARY) -> Device:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:N`; `auto` is the first GPU where there is one that PyTorch can use.

    Raises ConfigError for GPUs that are not there: the message says what is missing.
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
    """Open a device for each rank, from `cuda:first` on.

    Raises CudaUnavailableError where there is no such GPU at all, ConfigError where there are fewer than ranks.
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
    """Tell a build of PyTorch without CUDA by its version: `2.13.0+cpu`."""
    version = metadata.version("torch")
    if version.endswith("+cpu"):
        raise CudaUnavailableError(f"torch {version} is a build for CPUs; install one with CUDA")


def device_room(drivers: Sequence[CudaDriver], topology: Topology, card: ModelCard, layout: KVLayout) -> Room:
    """What GPUs have left for KV once every worker has its own copy of the weights: nine tenths of it are taken.

    Each device holds its rank's part of weights and blocks; the one with the least room for its part decides.
    Quantized files are computed in bfloat16 and so grow: up to four times, from four bits.
    """
    weights_bytes = card.weight_bytes * (4 if card.format == "gguf" else 1) // layout.ranks
    workers = max(2 if topology == Topology() else 0, topology.prefill + topology.decode + topology.mixed)
    rooms: list[int] = []
    for driver, shard in zip(drivers, layout.shards, strict=True):
        free_bytes = max(0, driver.free_bytes() - workers * (weights_bytes + CUDA_WORKER_BYTES))
        rooms.append(free_bytes * layout.block_bytes // shard.size_bytes)
    free_bytes = min(rooms)
    return Room(free_bytes=free_bytes, wanted_bytes=free_bytes, most_bytes=free_bytes * 9 // 10)
