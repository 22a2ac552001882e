"""Read decision logs for the commands: open a log, and rebuild the cluster that wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from baton.cli.output import warn
from baton.core.config import PolicyConfig
from baton.core.errors import ConfigError
from baton.core.plugin import source_digests
from baton.decide.control.build import build_coordinator, build_policies
from baton.decide.control.cluster import Cluster
from baton.decide.control.decision_log import Decision, LogHeader, SimHeader
from baton.decide.control.guarded_eviction import eviction_maker
from baton.decide.control.host_pools import PoolRules
from baton.decide.cost.load import load_cost
from baton.decide.policy.policy_sets import policy_set
from baton.lab.report.questions import Notes, watched
from baton.lab.sim.cluster import fresh_cluster
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.spec import ClusterSpec
from baton.serve.live.log_file import read_log

Header = LogHeader | SimHeader


def open_log(path: Path, name: str = "") -> tuple[Header, Iterator[Decision]]:
    """Open a log. Return its header and its decisions. `name`: name in error messages, by default the path.

    Raises ConfigError, here or while the decisions are read, if the file is not a log.
    """
    return read_log(path, name)


def changed_policies(header: Header) -> list[str]:
    """Return a warning for each user-defined policy whose file has changed since the log was written."""
    now = source_digests(header.sources)
    return [
        f"the policy {use} is not the one that decided: its file has changed since the log was written"
        for use, digest in header.sources.items()
        if now.get(use) != digest
    ]


def build_cluster(header: Header, notes: Notes | None = None) -> Cluster:
    """Return the cluster that wrote a log, in its state before the first event.

    `notes`: records the input and choice of each policy. Raises ConfigError if a policy does not exist any more.
    """
    if isinstance(header, SimHeader):
        spec = spec_of(header)
        made = configured_policies(policies_of(header), spec)
        return fresh_cluster(spec, made if notes is None else replace(made, cluster=watched(made.cluster, notes)))
    policies = build_policies(header.policy, load_cost(header.cost, folder=Path()).cost)
    if notes is not None:
        policies = watched(policies, notes)
    eviction = eviction_maker(header.policy.eviction, _warn)
    rules = PoolRules(eviction=eviction, prompts=header.prompts, handover_bytes=header.handover_bytes)
    return Cluster(build_coordinator(header, policies), rules)


def _warn(why: str) -> None:
    warn([why])


def policies_of(header: Header) -> PolicyConfig:
    """Return the policies of the log. Raises ConfigError if it names a policy set that this version does not have."""
    return policy_set(header.policy) if isinstance(header.policy, str) else header.policy


def block_tokens(header: Header) -> int:
    """Return the number of tokens that each block hash in the log stands for."""
    return spec_of(header).kv.block_tokens if isinstance(header, SimHeader) else header.block_tokens


def spec_of(header: SimHeader) -> ClusterSpec:
    """Return the simulated cluster of a log. Raises ConfigError if another version has written it."""
    try:
        return msgspec.json.decode(header.cluster, type=ClusterSpec)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the log's cluster cannot be read: {error}; simulate again with this version") from error
