"""Build a coordinator from configuration. The server, the simulator and replays share this code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from baton.core.config import Plugin, PolicyConfig
from baton.core.plugin import check_port, load_plugin
from baton.core.ports import CostModel
from baton.decide.control.coordinator import Coordinator, Policies
from baton.decide.control.decision_log import LogHeader
from baton.decide.control.reshaping import Reshaping
from baton.decide.control.retries import Retries
from baton.decide.control.start_queue import StartQueue
from baton.decide.policy.admission import AdmissionPolicy
from baton.decide.policy.fairness import FairnessPolicy
from baton.decide.policy.fleet import MovesPolicy, RolesPolicy, ScalingPolicy
from baton.decide.policy.handoff import FirstTokenPolicy, HandoffPolicy
from baton.decide.policy.lengths import LengthsPolicy
from baton.decide.policy.placement import PlacementPolicy
from baton.decide.policy.routing import RoutingPolicy
from baton.decide.policy.streaming import StreamingPolicy

Port = TypeVar("Port")


def build_coordinator(header: LogHeader, policies: Policies) -> Coordinator:
    """Return the coordinator that a log's header describes, in its state before the first event.

    `policies`: those of the header, or wrappers around them.
    """
    return Coordinator(
        policies,
        header.block_tokens,
        Retries(header.retries),
        header.prompts.window,
        StartQueue(header.queue_s),
        Reshaping(header.scaling),
    )


def build_policies(policy: PolicyConfig, cost: CostModel) -> Policies:
    """Load the policy of every family. Raises ConfigError if a plug-in is invalid."""
    loader = _PolicyLoader()
    return Policies(
        admission=loader.load(policy.admission, AdmissionPolicy),
        routing=loader.load(policy.routing, RoutingPolicy),
        placement=loader.load(policy.placement, PlacementPolicy),
        fairness=loader.load(policy.fairness, FairnessPolicy),
        roles=loader.load(policy.roles, RolesPolicy),
        scaling=loader.load(policy.scaling, ScalingPolicy),
        moves=loader.load(policy.moves, MovesPolicy),
        lengths=loader.load(policy.lengths, LengthsPolicy),
        streaming=loader.load(policy.streaming, StreamingPolicy),
        handoff=loader.load(policy.handoff, HandoffPolicy),
        first_token=loader.load(policy.first_token, FirstTokenPolicy),
        cost=cost,
    )


@dataclass(slots=True)
class _PolicyLoader:
    """Loads policies. Families that name the same class with the same options share one object."""

    made: dict[tuple[str, bytes], object] = field(default_factory=dict[tuple[str, bytes], object])

    def load(self, plugin: Plugin, port: type[Port]) -> Port:
        key = (plugin.use, msgspec.json.encode(plugin.options, order="sorted"))
        if key not in self.made:
            self.made[key] = load_plugin(plugin.use, plugin.options, expects=port)
        return check_port(plugin.use, self.made[key], port)
