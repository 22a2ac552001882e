"""Named sets of policies: `baton sim --policy NAME`, and `policy.name` in the configuration of `baton serve`.

A set has a policy for every family. A policy that a configuration names for one family replaces that of the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict, replace

from baton.core.class_config import ClassConfig
from baton.core.config import Config, Plugin, PolicyChoice, PolicyConfig
from baton.core.errors import ConfigError
from baton.core.plugin import load_plugin, source_digests
from baton.core.validation import did_you_mean
from baton.decide.policy.fairness import FairnessPolicy, ServiceFairness

ADMIT_ALL = Plugin(use="admit-all")
ROUND_ROBIN = Plugin(use="round-robin")
RANDOM = Plugin(use="random")
LEAST_LOAD = Plugin(use="least-load")
SHORTEST_QUEUE = Plugin(use="shortest-queue")
SOONEST = Plugin(use="earliest-first-token")
FASTEST = Plugin(use="fastest-step")
GLOBAL = Plugin(use="global-cache-aware")
DYNAMO = Plugin(use="dynamo-router")
LLMD = Plugin(use="llm-d-scorer")
STREAMED = Plugin(use="while-computing")
DIRECT = Plugin(use="direct-handoff")
VTC = Plugin(use="vtc")
FREEST = Plugin(use="llumnix-routing")
CONSERVE = Plugin(use="conserve-pinning")


def _of(routing: Plugin, placement: Plugin, admission: Plugin = ADMIT_ALL) -> PolicyConfig:
    """Return a set for a published system, by default with chunks of a fixed size and static roles."""
    batching = Plugin(use="mixed-chunked")
    when_done = Plugin(use="when-done")
    return PolicyConfig(
        admission=admission,
        routing=routing,
        placement=placement,
        batching=batching,
        streaming=when_done,
        handoff=DIRECT,
        roles=Plugin(use="static-roles"),
    )


POLICY_SETS: dict[str, PolicyConfig] = {
    "baton": PolicyConfig(),
    "direct": PolicyConfig(handoff=DIRECT),
    "central": PolicyConfig(handoff=Plugin(use="pool-handoff")),
    "pull": PolicyConfig(fairness=VTC),
    "first-token-by-decode": PolicyConfig(first_token=Plugin(use="first-token-by-decode")),
    "random": _of(RANDOM, RANDOM),
    "round-robin": _of(ROUND_ROBIN, ROUND_ROBIN),
    "least-load": _of(LEAST_LOAD, LEAST_LOAD),
    "cache-aware-local": _of(SOONEST, FASTEST),
    "cache-aware-global": _of(GLOBAL, FASTEST),
    "dynamo": _of(DYNAMO, DYNAMO),
    "sglang": _of(Plugin(use="sglang-router"), LEAST_LOAD),
    "llm-d": _of(LLMD, LLMD),
    "splitwise": _of(Plugin(use="splitwise-routing"), Plugin(use="splitwise-placement")),
    "distserve": _of(SHORTEST_QUEUE, LEAST_LOAD),
    "sarathi": _of(Plugin(use="colocated"), LEAST_LOAD),
    "tetriinfer": replace(
        _of(SHORTEST_QUEUE, Plugin(use="tetriinfer-placement")), roles=Plugin(use="tetriinfer-roles")
    ),
    "arrow": replace(_of(Plugin(use="arrow-routing"), FASTEST), roles=Plugin(use="arrow-roles")),
    "mooncake": replace(_of(GLOBAL, FASTEST, Plugin(use="mooncake-rejection")), streaming=STREAMED),
    "mooncake-no-prediction": replace(
        _of(GLOBAL, FASTEST, Plugin(use="mooncake-rejection-by-load")), streaming=STREAMED
    ),
    "vtc": replace(_of(SHORTEST_QUEUE, LEAST_LOAD), fairness=VTC),
    "llumnix": replace(_of(FREEST, FREEST), moves=Plugin(use="llumnix-moves")),
    "conserve": _of(CONSERVE, CONSERVE),
    "ampd": _of(Plugin(use="ampd-routing"), LEAST_LOAD),
    "pla": replace(_of(Plugin(use="pla-routing"), LEAST_LOAD), batching=Plugin(use="pla-batching")),
}
"""All sets by their name in configuration."""


def policy_set(name: str) -> PolicyConfig:
    """Return the set with this name. Raise ConfigError with the known names if there is none."""
    found = POLICY_SETS.get(name)
    if found is None:
        raise ConfigError(f"unknown policy {name!r}{did_you_mean(name, POLICY_SETS)}; known: {', '.join(POLICY_SETS)}")
    return found


def plugin_names(policy: PolicyConfig) -> dict[str, str]:
    """Return the plug-in of each family, and the name of the set under `name` if it has one."""
    plugins = {family: use.use for family, use in asdict(policy).items() if isinstance(use, Plugin)}
    return {"name": policy.name, **plugins} if policy.name else plugins


def own_sources(policy: PolicyConfig) -> dict[str, str]:
    """Return the source digest of each policy that is not built in."""
    return source_digests(use for family, use in plugin_names(policy).items() if family != "name")


def policy_of(config: Config, *, tenants: int) -> PolicyConfig:
    """Return the policies of a server. Several tenants share it fairly, unless a policy is chosen."""
    choice = config.policy
    is_chosen = bool(choice.name) or choice.fairness is not None
    resolved = resolve(choice)
    if tenants > 1 and not is_chosen:
        resolved = replace(resolved, fairness=VTC)
    if config.engines.is_used:
        resolved = for_engines(choice, resolved, is_paired=config.engines.is_paired)
    return share_by_class(resolved, config.classes) if config.classes else resolved


def for_engines(choice: PolicyChoice, resolved: PolicyConfig, *, is_paired: bool = False) -> PolicyConfig:
    """Return the policies for servers of another engine. Raise ConfigError for a choice that they do not support.

    Such a server gives KV to another one only once, after the whole prompt, and keeps the role it was started with.
    `is_paired`: the decode server must be chosen when the prompt starts.
    """
    given = choice.first_token
    if given is not None and given.use == "first-token-by-prefill":
        raise ConfigError(
            "policy.first_token is 'first-token-by-prefill', but servers in engines.servers cannot continue after it:"
            " take 'first-token-by-decode'"
        )
    stays = {
        family: Plugin(use=use.use, options={"fetches": False, "hands_off": False, **use.options})
        for family, use in asdict(resolved).items()
        if isinstance(use, Plugin) and use.use == "slo-headroom"
    }
    return replace(
        resolved,
        **stays,
        first_token=given or Plugin(use="first-token-by-decode"),
        roles=choice.roles or Plugin(use="static-roles"),
        streaming=Plugin(use="place-at-start" if is_paired else "when-done"),
    )


def share_by_class(policy: PolicyConfig, classes: Sequence[ClassConfig]) -> PolicyConfig:
    """Return the policies of a fleet with service classes. Raise ConfigError if fairness does not count service.

    Classes share the fleet in the coordinator's fair queue, which the default fairness policy does not use. Workers
    that their reserves need keep their roles.
    """
    if policy.roles.use == "demand-roles":
        reserves = {
            "prefill_ratio_min": min(1.0, sum(each.prefill_ratio for each in classes)),
            "decode_ratio_min": min(1.0, sum(each.decode_ratio for each in classes)),
        }
        policy = replace(policy, roles=Plugin(use=policy.roles.use, options={**reserves, **policy.roles.options}))
    if policy.fairness == PolicyConfig().fairness:
        return replace(policy, fairness=VTC)
    use, options = policy.fairness.use, policy.fairness.options
    if not isinstance(load_plugin(use, options, expects=FairnessPolicy), ServiceFairness):
        raise ConfigError(f"policy.fairness is {use!r}, but classes need one that counts service: use 'vtc'")
    return policy


def resolve(choice: PolicyChoice) -> PolicyConfig:
    """Complete a user's choice from the named set, or from the defaults.

    Raise ConfigError for an unknown name, or for one option with two values (`_share_options`).
    """
    own = {family: use for family, use in asdict(choice).items() if use is not None}
    return _share_options(replace(policy_set(choice.name) if choice.name else PolicyConfig(), **own))


def _share_options(policy: PolicyConfig) -> PolicyConfig:
    """Return the policies, where an option that one family sets holds in all families that name the same policy.

    Families share one object only if they name it with the same options. Without this rule, an option at
    `policy.admission` alone would take admission out of what `slo-headroom` knows of routing and placement.
    Raise ConfigError if two families set one option to different values.
    """
    families = {family: use for family, use in asdict(policy).items() if isinstance(use, Plugin)}
    shared: dict[str, dict[str, Any]] = {}
    for family, use in families.items():
        options = shared.setdefault(use.use, {})
        for name, value in use.options.items():
            if options.setdefault(name, value) != value:
                raise ConfigError(
                    f"policy.{family}.options.{name} is {value!r}, but another family that uses {use.use!r} sets it"
                    f" to {options[name]!r}: families that name one policy share it, so give one value"
                )
    return replace(policy, **{family: replace(use, options=shared[use.use]) for family, use in families.items()})
