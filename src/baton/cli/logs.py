"""Decision logs for commands: open one, and build the coordinator that wrote it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from baton.control.advice import Policies
from baton.control.build import build_coordinator
from baton.control.coordinator import Coordinator
from baton.control.decision_log import Decision, LogHeader, SimHeader
from baton.core.errors import ConfigError
from baton.core.ports import CostModel
from baton.cost.load import load_cost
from baton.link.log_file import read_log
from baton.sim.cluster import cluster_coordinator
from baton.sim.policies import build_policies
from baton.sim.spec import ClusterSpec

Header = LogHeader | SimHeader


def open_log(path: Path) -> tuple[Header, Iterator[Decision]]:
    """Raises ConfigError for what is no log, here or while it is read."""
    return read_log(path)


def fresh_coordinator(header: Header) -> Coordinator:
    """A coordinator as the one that wrote the log. Raises ConfigError where its policies are not there any more."""
    if isinstance(header, SimHeader):
        spec = spec_of(header)
        return cluster_coordinator(spec, build_policies(header.policy, spec))
    return build_coordinator(
        header.policy,
        cost=load_cost(header.cost, folder=Path()).cost,
        block_tokens=header.block_tokens,
        attempts_max=header.attempts_max,
        window=header.window,
    )


def block_tokens(header: Header) -> int:
    """Tokens of the blocks that the log's hashes name."""
    return spec_of(header).kv.block_tokens if isinstance(header, SimHeader) else header.block_tokens


def spec_of(header: SimHeader) -> ClusterSpec:
    """The cluster that a simulation's log is of. Raises ConfigError for one of another version."""
    try:
        return msgspec.json.decode(header.cluster, type=ClusterSpec)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the log's cluster cannot be read: {error}; simulate again with this version") from error


def other_policies(name: str, header: Header, cost: CostModel) -> Policies:
    """The policies of a name, as `baton sim --policy` has them, with the cost model of the log.

    Raises ConfigError for an unknown name: it lists the known.
    """
    spec = spec_of(header) if isinstance(header, SimHeader) else ClusterSpec()
    return replace(build_policies(name, spec).cluster, cost=cost)


def write_file(path: Path, content: bytes) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another file") from error
