"""A user-described GPU: validated, and completed from a GPU of the catalogue."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct, structs

from baton.core.errors import ConfigError
from baton.core.validation import Range
from baton.decide.cost.catalog import all_hardware, hardware, is_known
from baton.decide.cost.hardware import Hardware

NEEDED = ("bf16_flops", "memory_bytes", "memory_bytes_per_s")
"""Required keys if `like` is not given."""
NEVER_BORROWED = ("fp8_flops", "int8_flops", "usd_per_hour", "node_w")
"""Keys that are not taken from the nearest GPU: without `like`, fp8 must be stated explicitly."""
_RANGES: dict[str, Range] = {
    "bf16_flops": Range(least=1e12, such_as="FLOP/s, such as 312e12"),
    "fp8_flops": Range(least=1e12, such_as="FLOP/s, such as 624e12"),
    "int8_flops": Range(least=1e12, such_as="OP/s, such as 624e12"),
    "memory_bytes": Range(least=1e9, such_as="bytes, such as 80e9"),
    "memory_bytes_per_s": Range(least=1e9, such_as="bytes/s, such as 2.0e12"),
    "gpu_w": Range(least=1, such_as="watts, such as 400"),
    "gpus_per_node": Range(least=1, such_as="GPUs, such as 8"),
    "inter_node_bytes_per_s": Range(least=1e6, such_as="bytes/s of one GPU, such as 25e9"),
    "intra_node_bytes_per_s": Range(least=1e6, such_as="bytes/s of one GPU, such as 300e9"),
    "p2p_latency_s": Range(least=0, such_as="seconds, such as 1e-5"),
    "usd_per_hour": Range(least=0, such_as="USD of one GPU and hour, such as 2.5"),
    "node_w": Range(least=1, such_as="watts of a whole node, such as 6500"),
}
"""Allowed range per key. The lower bounds catch wrong units, such as 989 for 989e12 FLOP/s."""


class CustomHardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of GPU in its usual node. Keys are those of `Hardware`; None: the value of `like`."""

    name: str
    like: str = ""
    """A similar GPU of the catalogue, for missing values. Empty: the nearest one by arithmetic and memory bandwidth,
    for missing links, power and kernel efficiency."""
    bf16_flops: float | None = None
    fp8_flops: float | None = None
    int8_flops: float | None = None
    memory_bytes_per_s: float | None = None
    memory_bytes: float | None = None
    gpu_w: float | None = None
    gpus_per_node: int | None = None
    inter_node_bytes_per_s: float | None = None
    intra_node_bytes_per_s: float | None = None
    p2p_latency_s: float | None = None
    usd_per_hour: float | None = None
    node_w: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The figures that the description states itself, by key. Figures taken from `like` are not among them."""
        values = structs.asdict(self)
        return {key: values[key] for key in _RANGES if values[key] is not None}

    @property
    def plain(self) -> dict[str, Any]:
        """The description as plain data, as in a file."""
        return {"name": self.name, **({"like": self.like} if self.like else {}), **self.given}

    def problems(self) -> list[str]:
        """Return every problem, except an unknown `like`."""
        where = f"hardware {self.name}:"
        found = ["hardware needs a name"] if not self.name else []
        if is_known(self.name):
            found.append(
                f"{where} the catalogue has {hardware(self.name).name}: give yours another name, and "
                f'like = "{self.name}" to copy the values that you leave out'
            )
        found += [
            _RANGES[key].problem(f"{where} {key}", value)
            for key, value in self.given.items()
            if not _RANGES[key].takes(value)
        ]
        missing = [key for key in NEEDED if key not in self.given]
        if missing and not self.like:
            found.append(
                f"{where} {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; or say which known GPU "
                f'it is like, such as like = "h100"'
            )
        return found


def described(own: CustomHardware) -> Hardware:
    """Return the completed GPU. Raise ConfigError with every problem, one per line."""
    problems = own.problems()
    try:
        base = hardware(own.like) if own.like else None
    except ConfigError as error:
        problems.append(f"hardware {own.name}: like: {error}")
        base = None
    if problems:
        raise ConfigError("\n".join(problems))
    given = own.given
    if base is None:
        base = nearest_hardware(bf16_flops=given["bf16_flops"], memory_bytes_per_s=given["memory_bytes_per_s"])
        given = dict.fromkeys(NEVER_BORROWED) | given
    elif "gpu_w" in given or "gpus_per_node" in given:
        given = {"node_w": None} | given  # the power of the known node does not apply
    borrowed = [key for key in _RANGES if key not in given]
    note = (
        f"{own.name}: kernel efficiencies of {base.kernels.name}, all-reduce of {base.links.name}, scaled to its peaks"
    )
    note += f"; {', '.join(borrowed)} of {base.name}" if borrowed else ""
    return structs.replace(base, name=own.name, note=note, **given)


def nearest_hardware(*, bf16_flops: float, memory_bytes_per_s: float) -> Hardware:
    """Return the GPU of the catalogue whose arithmetic and memory bandwidth differ by the smallest factors."""

    def factors(gpu: Hardware) -> float:
        arithmetic, memory = bf16_flops / gpu.bf16_flops, memory_bytes_per_s / gpu.memory_bytes_per_s
        return abs(math.log(arithmetic)) + abs(math.log(memory))

    return min(all_hardware().values(), key=factors)
