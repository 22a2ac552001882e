"""A simulated cluster as a TOML file: its workers, its KV blocks, what a step costs, how long a message takes."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec import Struct

from baton.core.config import BatchLimits, Topology
from baton.core.errors import ConfigError
from baton.core.names import did_you_mean
from baton.core.types import HostId, Role, WorkerId, WorkerView
from baton.cost.linear import LinearCost

HOST = HostId("host-0")
"""One host: a handoff between hosts is not part of the live system yet, so it is not simulated either."""


class SimKV(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arena."""

    blocks: int = 4096
    block_tokens: int = 16


class SimLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a message between the server and a worker is under way: uniform between two bounds."""

    delay_min_s: float = 0.0002
    delay_max_s: float = 0.0006


class SimCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of `LinearCost`, which says what each means."""

    step_overhead_s: float = 0.040
    prefill_token_s: float = 0.0019
    prefill_pair_s: float = 0.0
    decode_request_s: float = 0.004
    context_token_s: float = 0.000004
    handoff_local_s: float = 0.0005
    handoff_token_s: float = 0.00002

    def model(self) -> LinearCost:
        return LinearCost(
            step_overhead_s=self.step_overhead_s,
            prefill_token_s=self.prefill_token_s,
            prefill_pair_s=self.prefill_pair_s,
            decode_request_s=self.decode_request_s,
            context_token_s=self.context_token_s,
            handoff_local_s=self.handoff_local_s,
            handoff_token_s=self.handoff_token_s,
        )


class ClusterSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a simulated cluster can be told."""

    topology: Topology = Topology(prefill=1, decode=1)
    kv: SimKV = SimKV()
    batch: BatchLimits = BatchLimits()
    cost: SimCost = SimCost()
    link: SimLink = SimLink()
    worker_start_s: float = 30.0
    """How long a worker takes from being asked for to being ready."""
    queue_requests_max: int = 1024
    """Most requests in the cluster; more are rejected."""
    output_tokens_max: int = 4096
    """What every simulated client asks for at most: no policy can tell a short answer from a long one."""

    @property
    def request_tokens_max(self) -> int:
        """Most tokens, prompt and output together, that the arena can hold for one request."""
        return self.kv.blocks * self.kv.block_tokens

    def views(self) -> list[WorkerView]:
        """The workers, all on one host."""
        counts: list[tuple[Role, int]] = [
            ("prefill", self.topology.prefill),
            ("decode", self.topology.decode),
            ("mixed", self.topology.mixed),
        ]
        return [
            WorkerView(id=WorkerId(f"{role}-{index}"), host=HOST, role=role)
            for role, count in counts
            for index in range(count)
        ]

    def problems(self) -> list[str]:
        """Everything that is wrong with it. Empty means ready to simulate."""
        found = [
            f"{name} is {value}, but must be at least {low:g}"
            for name, value, low in (
                ("kv.blocks", self.kv.blocks, 1),
                ("kv.block_tokens", self.kv.block_tokens, 1),
                ("batch.step_tokens_max", self.batch.step_tokens_max, 1),
                ("batch.requests_max", self.batch.requests_max, 1),
                ("queue_requests_max", self.queue_requests_max, 1),
                ("output_tokens_max", self.output_tokens_max, 1),
                ("link.delay_min_s", self.link.delay_min_s, 0.0),
                ("link.delay_max_s", self.link.delay_max_s, self.link.delay_min_s),
                ("cost.step_overhead_s", self.cost.step_overhead_s, 1e-9),
            )
            if not value >= low
        ]
        topology = self.topology
        if min(topology.prefill, topology.decode, topology.mixed) < 0 or not self.views():
            found.append("topology has no worker: set prefill and decode, or mixed, to 1 or more")
        return found


def load_spec(text: str) -> ClusterSpec:
    """Decode and check a cluster file's text. Raises ConfigError with every problem that was found, one per line."""
    try:
        raw = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a TOML file: {error}") from error
    unknown = _unknown_keys(raw)
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        spec = msgspec.convert(raw, ClusterSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"not a valid cluster: {error}") from error
    problems = spec.problems()
    if problems:
        raise ConfigError("\n".join(problems))
    return spec


def _unknown_keys(raw: dict[str, Any]) -> list[str]:
    sections: dict[str, type[Struct]] = {
        "topology": Topology, "kv": SimKV, "batch": BatchLimits, "cost": SimCost, "link": SimLink,
    }  # fmt: skip
    known = ClusterSpec.__struct_fields__
    found = [f"unknown key {key}{did_you_mean(key, known)}" for key in raw if key not in known]
    for section, kind in sections.items():
        fields = kind.__struct_fields__
        keys = raw.get(section, {})
        if not isinstance(keys, dict):
            found.append(f"{section} must be a section: write [{section}] and its keys below")
            continue
        found += [
            f"unknown key {section}.{key}{did_you_mean(key, fields)}"
            for key in cast("dict[str, Any]", keys)
            if key not in fields
        ]
    return found
