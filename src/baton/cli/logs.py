"""Decision logs for commands: open one, and build the coordinator that wrote it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from baton.cli.policy_choice import policy_of
from baton.core.config import PolicyConfig
from baton.core.errors import ConfigError
from baton.core.plugin import source_digests
from baton.core.ports import CostModel
from baton.decide.control.advice import Policies
from baton.decide.control.build import build_coordinator
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.decision_log import Decision, LogHeader, SimHeader
from baton.decide.cost.load import load_cost
from baton.decide.policy.policy_sets import policy_set
from baton.lab.sim.cluster import cluster_coordinator
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.spec import ClusterSpec
from baton.serve.live.log_file import read_log

Header = LogHeader | SimHeader


def open_log(path: Path, name: str = "") -> tuple[Header, Iterator[Decision]]:
    """Raises ConfigError for what is no log, here or while it is read. `name`: what its reader calls it."""
    return read_log(path, name)


def changed_policies(header: Header) -> list[str]:
    """Say which policies of the user's own are not what they were when the log was written."""
    now = source_digests(header.sources)
    return [
        f"the policy {use} is not the one that decided: its file has changed since the log was written"
        for use, digest in header.sources.items()
        if now.get(use) != digest
    ]


def fresh_coordinator(header: Header) -> Coordinator:
    """A coordinator as the one that wrote the log. Raises ConfigError where its policies are not there any more."""
    if isinstance(header, SimHeader):
        spec = spec_of(header)
        return cluster_coordinator(spec, configured_policies(policies_of(header), spec))
    return build_coordinator(
        header.policy,
        cost=load_cost(header.cost, folder=Path()).cost,
        block_tokens=header.block_tokens,
        attempts_max=header.attempts_max,
        window=header.window,
    )


def policies_of(header: Header) -> PolicyConfig:
    """What decided. Raises ConfigError for a name that is not known any more."""
    return policy_set(header.policy) if isinstance(header.policy, str) else header.policy


def block_tokens(header: Header) -> int:
    """Tokens of the blocks that the log's hashes name."""
    return spec_of(header).kv.block_tokens if isinstance(header, SimHeader) else header.block_tokens


def spec_of(header: SimHeader) -> ClusterSpec:
    """The cluster that a simulation's log is of. Raises ConfigError for one of another version."""
    try:
        return msgspec.json.decode(header.cluster, type=ClusterSpec)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the log's cluster cannot be read: {error}; simulate again with this version") from error


def other_policies(asked: str, header: Header, cost: CostModel) -> Policies:
    """The policies that `--policy` asks for, as `baton sim` has them, with the cost model of the log.

    Raises ConfigError for an unknown name: it lists the known.
    """
    spec = spec_of(header) if isinstance(header, SimHeader) else ClusterSpec()
    return replace(configured_policies(policy_of(asked), spec).cluster, cost=cost)
