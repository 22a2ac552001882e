"""Build the policies of a simulation from the same names and options as `baton serve`."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.config import Plugin, PolicyConfig
from baton.core.errors import ConfigError
from baton.core.plugin import is_ours, load_plugin, plugin_maker
from baton.decide.control.build import build_policies
from baton.decide.control.guarded_eviction import eviction_maker
from baton.decide.policy.batching import BatchingPolicy
from baton.decide.policy.fairness import FairnessPolicy
from baton.decide.policy.policy_sets import share_by_class
from baton.lab.sim.cluster import SimPolicies
from baton.lab.sim.spec import ClusterSpec


def configured_policies(config: PolicyConfig, spec: ClusterSpec) -> SimPolicies:
    """Return new policies by their configuration. Raises ConfigError for a plug-in that does not fit.

    A built-in admission policy takes `requests_max` from the cluster file, unless its options set it.
    """
    if spec.classes:
        config = share_by_class(config, spec.classes)
    bound = {"requests_max": spec.queue_requests_max}
    if is_ours(config.admission.use):
        config = _with_plugin_replaced(
            config, config.admission, replace(config.admission, options=bound | config.admission.options)
        )
    return SimPolicies(
        cluster=build_policies(config, spec.cost_model()),
        batching=load_plugin(config.batching.use, config.batching.options, expects=BatchingPolicy),
        fairness=plugin_maker(config.fairness.use, config.fairness.options, expects=FairnessPolicy),
        eviction=eviction_maker(config.eviction, _refuse),
        are_own_in_workers=not all(is_ours(plugin.use) for plugin in (config.batching, config.fairness)),
    )


def _refuse(why: str) -> None:
    """Raise ConfigError where a live server would replace the eviction policy by `lru`.

    The results would be those of `lru`, so the simulation ends instead.
    """
    instead = "would use `lru` instead and log this, but a simulation would show the results of `lru`"
    raise ConfigError(f"{why}. `baton serve` {instead}: correct the policy")


def _with_plugin_replaced(config: PolicyConfig, old: Plugin, new: Plugin) -> PolicyConfig:
    """Return the configuration with `old` replaced in all families that name it, so that one object serves them."""
    families = {"admission": config.admission, "routing": config.routing, "placement": config.placement}
    return replace(config, **{family: new for family, plugin in families.items() if plugin == old})
