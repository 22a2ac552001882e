"""Read and check a file of faults for `baton sim --faults`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.files import form_of, in_file, keys_of
from baton.core.validation import Check, did_you_mean, type_problems
from baton.lab.sim.faults import EVERYWHERE, TimedFault
from baton.lab.sim.spec import ClusterSpec


class FaultFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Top-level keys of the file."""

    faults: tuple[TimedFault, ...]


def read_faults(path: Path, spec: ClusterSpec) -> tuple[TimedFault, ...]:
    """Return the faults of a `.toml`, `.yaml` or `.json` file for a cluster.

    Raises ConfigError with every problem, each with the file's name.
    """
    with in_file(path, "the faults"):
        raw = keys_of(path.read_text(encoding="utf-8"), form_of(path), example="the key `faults` with the list of them")
        problems = _problems(raw, spec)
        if problems:
            raise ConfigError("\n".join(problems))
        return msgspec.convert(raw, FaultFile).faults


def fault_problems(faults: Sequence[TimedFault], spec: ClusterSpec) -> list[str]:
    """Return why faults cannot strike this cluster: unknown names, and times or factors out of range."""
    return _problems(msgspec.to_builtins(FaultFile(tuple(faults))), spec)


def _problems(raw: dict[str, Any], spec: ClusterSpec) -> list[str]:
    found = type_problems(raw, FaultFile, check=_check(spec))
    if found or spec.cells == 1:
        return found
    return _cell_problems(msgspec.convert(raw, FaultFile).faults, spec.cells)


def _cell_problems(faults: Sequence[TimedFault], cells: int) -> list[str]:
    """Return an error for each fault that names a worker or a host, because every cell has one of that name."""
    why = f"names a worker or a host, and each of the {cells} cells has one of that name"
    instead = f"play one cell with its share: cells = 1 and 1/{cells} of the requests"
    return [
        f"faults[{place}]: a {type(fault).__name__} {why}; {instead}"
        for place, fault in enumerate(faults)
        if not isinstance(fault, EVERYWHERE)
    ]


def _check(spec: ClusterSpec) -> Check:
    """Return a check that names exist in the cluster and that times and factors are in range."""
    hosts = [*spec.hosts()]
    known: dict[str, Sequence[str]] = {
        "worker": [view.id for view in spec.views()],
        "host": hosts,
        "one": hosts,
        "other": hosts,
        "tier": [tier.name for tier in spec.tiers],
    }

    def check(place: str, value: object) -> list[str]:
        key = place.rpartition(".")[2]
        if isinstance(value, str) and value not in known.get(key, [value]):
            there = ", ".join(known[key][:8]) or "none"
            return [f"{place}: there is no {value!r}{did_you_mean(value, known[key])}, there is {there}"]
        if isinstance(value, float | int):
            return _number_problems(place, key, value)
        return []

    return check


def _number_problems(place: str, key: str, value: float) -> list[str]:
    if key.endswith("_s") and not 0 <= value < math.inf:
        return [f"{place} is {value}: it must be a time of 0 s or more"]
    if key == "factor" and not 0 < value < math.inf:
        return [f"{place} is {value}: it must be above 0; 2.0 makes steps take twice as long"]
    return []
