"""Build a coordinator from configuration: the same way live, in the simulator and in a replay."""

from __future__ import annotations

from baton.control.coordinator import Coordinator, Policies
from baton.core.config import PolicyConfig
from baton.core.plugin import load_plugin
from baton.core.ports import CostModel
from baton.policy.admission import AdmissionPolicy
from baton.policy.fairness import FairnessPolicy
from baton.policy.placement import PlacementPolicy
from baton.policy.roles import RolesPolicy
from baton.policy.routing import RoutingPolicy
from baton.policy.scaling import ScalingPolicy


def build_coordinator(policy: PolicyConfig, *, cost: CostModel, block_tokens: int, attempts_max: int) -> Coordinator:
    """Load the configured policies into a coordinator. Raises ConfigError for a plug-in that does not fit."""
    policies = Policies(
        admission=load_plugin(policy.admission.use, policy.admission.options, expects=AdmissionPolicy),
        routing=load_plugin(policy.routing.use, policy.routing.options, expects=RoutingPolicy),
        placement=load_plugin(policy.placement.use, policy.placement.options, expects=PlacementPolicy),
        fairness=load_plugin(policy.fairness.use, policy.fairness.options, expects=FairnessPolicy),
        roles=load_plugin(policy.roles.use, policy.roles.options, expects=RolesPolicy),
        scaling=load_plugin(policy.scaling.use, policy.scaling.options, expects=ScalingPolicy),
        cost=cost,
    )
    return Coordinator(policies, block_tokens, attempts_max)
