"""A file of faults for `baton sim --faults`: what it may say, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from baton.core.errors import ConfigError
from baton.core.misfits import misfits
from baton.core.names import did_you_mean
from baton.sim.faults import Herd, TimedFault
from baton.sim.spec import ClusterSpec
from baton.workload.request import Trace, TraceRequest


class FaultFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    faults: tuple[TimedFault, ...]


def read_faults(path: Path, spec: ClusterSpec) -> tuple[TimedFault, ...]:
    """Read a file of faults, `.toml`, `.yaml` or `.json`, for a cluster.

    Raises ConfigError with every problem, each beside the file's name.
    """
    try:
        faults = _decode(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the faults: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a file of faults: {error}") from error
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
    problems = fault_problems(faults, spec)
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return faults


def _decode(path: Path) -> tuple[TimedFault, ...]:
    decode = {".toml": msgspec.toml.decode, ".json": msgspec.json.decode}.get(path.suffix, msgspec.yaml.decode)
    raw: object = decode(path.read_text())  # not JSON as YAML: there 1e1 is a word
    if not isinstance(raw, dict):
        raise ConfigError("it must have `faults`, a list")
    wrong = misfits(cast("dict[str, Any]", raw), FaultFile)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return msgspec.convert(raw, FaultFile).faults


def fault_problems(faults: Sequence[TimedFault], spec: ClusterSpec) -> list[str]:
    """Say what of these faults cannot strike this cluster: nobody has that name, or a time or factor is impossible."""
    if faults and spec.cells > 1:
        return [f"faults name the workers of one server, and the cluster has cells = {spec.cells}: play one cell"]
    known = {
        "worker": [view.id for view in spec.views()],
        "host": [*spec.hosts()],
        "one": [*spec.hosts()],
        "other": [*spec.hosts()],
        "tier": [tier.name for tier in spec.tiers],
    }
    found: list[str] = []
    for index, fault in enumerate(faults):
        found += _impossible(fault, known, f"faults[{index}]")
    return found


def _impossible(part: Struct, known: Mapping[str, Sequence[str]], place: str) -> list[str]:
    found: list[str] = []
    for key, value in msgspec.structs.asdict(part).items():
        below = f"{place}.{key}"
        if isinstance(value, Struct):
            found += _impossible(value, known, below)
        elif key in known and value not in known[key]:
            there = ", ".join(known[key][:8]) or "none"
            found.append(f"{below}: there is no {value!r}{did_you_mean(value, known[key])}, there is {there}")
        elif key.endswith("_s") and not 0 <= value < math.inf:
            found.append(f"{below} is {value}: it must be a time of 0 s or more")
        elif key == "factor" and not 0 < value < math.inf:
            found.append(f"{below} is {value}: it must be above 0; 2.0 makes steps take twice as long")
    return found


def herded(trace: Trace, faults: Iterable[TimedFault]) -> Trace:
    """The trace as it arrives: those who could not reach the server for a while come together at the end of it."""
    herds = sorted((fault for fault in faults if isinstance(fault, Herd)), key=lambda herd: herd.at_s)
    if not herds:
        return trace
    return replace(trace, requests=tuple(_with_herds(request, herds) for request in trace.requests))


def _with_herds(request: TraceRequest, herds: Sequence[Herd]) -> TraceRequest:
    """Herds in the order of time: who would come at the end of one may meet the next."""
    for herd in herds:
        if herd.at_s <= request.at_s < herd.at_s + herd.for_s:
            request = replace(request, at_s=herd.at_s + herd.for_s)
    return request
