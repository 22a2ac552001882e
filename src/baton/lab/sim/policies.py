"""The policies of a simulation by name: the same names, and the same objects, that `baton serve` takes."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.config import Plugin, PolicyConfig
from baton.core.errors import ConfigError
from baton.core.plugin import is_ours, load_plugin, plugin_maker
from baton.decide.control.build import build_policies as load_policies
from baton.decide.control.guarded_eviction import eviction_maker
from baton.decide.policy.batching import BatchingPolicy
from baton.decide.policy.fairness import FairnessPolicy
from baton.decide.policy.policy_sets import policy_set
from baton.lab.sim.cluster import SimPolicies
from baton.lab.sim.spec import ClusterSpec


def build_policies(name: str, spec: ClusterSpec) -> SimPolicies:
    """Make the policies of a name, fresh. Raises ConfigError for an unknown one: it lists the known."""
    return configured_policies(policy_set(name), spec)


def configured_policies(config: PolicyConfig, spec: ClusterSpec) -> SimPolicies:
    """Make the policies of a configuration, fresh. Raises ConfigError for a plug-in that does not fit.

    The queue is as long as the cluster file says, where the policy itself is not told.
    """
    bound = {"requests_max": spec.queue_requests_max}
    if is_ours(config.admission.use):
        config = _everywhere(
            config, config.admission, replace(config.admission, options=bound | config.admission.options)
        )
    return SimPolicies(
        cluster=load_policies(config, spec.cost_model()),
        batching=load_plugin(config.batching.use, config.batching.options, expects=BatchingPolicy),
        fairness=plugin_maker(config.fairness.use, config.fairness.options, expects=FairnessPolicy),
        eviction=eviction_maker(config.eviction, _refuse),
        are_own_in_workers=not all(is_ours(plugin.use) for plugin in (config.batching, config.fairness)),
    )


def _refuse(why: str) -> None:
    """End a simulation whose results would be those of another policy."""
    ends = "a simulation ends, as its results would be those of another policy"
    raise ConfigError(f"{why}. So baton serve goes on, and says it in its log; {ends}: mend the policy")


def _everywhere(config: PolicyConfig, old: Plugin, new: Plugin) -> PolicyConfig:
    """Put a plug-in in another's place in all families that it plays, so that it stays one object."""
    families = {"admission": config.admission, "routing": config.routing, "placement": config.placement}
    return replace(config, **{family: new for family, plugin in families.items() if plugin == old})
