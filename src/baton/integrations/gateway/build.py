"""Build a picker from a configuration, with the policies that a server with workers of other engines would have."""

from __future__ import annotations

from functools import partial
from logging import getLogger
from pathlib import Path

from msgspec.structs import asdict, replace

from baton.core.config import Config, Plugin, PolicyConfig
from baton.decide.control.build import build_coordinator, build_policies
from baton.decide.control.cluster import Cluster
from baton.decide.control.decision_log import LogHeader
from baton.decide.control.guarded_eviction import eviction_maker
from baton.decide.control.host_pools import PoolRules
from baton.decide.control.retries import RetryRules
from baton.decide.cost.load import inline_files, load_cost
from baton.decide.kv.window import PromptRules
from baton.decide.policy.policy_sets import for_engines, own_sources, resolve
from baton.integrations.gateway.asked import BLOCK_TOKENS
from baton.integrations.gateway.picker import REQUESTS_MAX, Picker
from baton.serve.live.log_thread import open_log

_COST = {
    "model": "linear",
    "step_overhead_s": 0.01,
    "prefill_token_s": 0.0001,
    "prefill_pair_s": 0.0,
    "decode_request_s": 0.0001,
    "context_token_s": 1e-8,
    "handoff_token_s": 0.000002,
}
"""Prices if the section `cost` is empty: an 8B model on a data centre GPU, rounded. Answers correct them."""
_STREAMING = Plugin(use="while-computing", options={"prompt_tokens_min": 0, "layer_groups_max": 1})
"""Chooses the decode server together with the one for the prompt, since the proxy gets both at once."""


def build_picker(config: Config) -> Picker:
    """Return a picker without servers. Raises ConfigError for an invalid policy, cost model or log file."""
    header = _header(config)
    policies = build_policies(header.policy, load_cost(header.cost, folder=Path()).cost)
    eviction = eviction_maker(header.policy.eviction, partial(getLogger("baton.picker").error, "%s"))
    cluster = Cluster(build_coordinator(header, policies), PoolRules(eviction=eviction, prompts=header.prompts))
    return Picker(cluster, open_log(config, header))


def _header(config: Config) -> LogHeader:
    policy, survival = _policy(config), config.survival
    retries = RetryRules(
        attempts_max=survival.attempts_max, per_minute=survival.retries_per_minute, ratio=survival.retry_ratio
    )
    return LogHeader(
        policy=policy,
        block_tokens=BLOCK_TOKENS,
        cost=inline_files(config.cost or _COST, folder=Path()),
        prompts=PromptRules(hash_tokens=BLOCK_TOKENS),
        retries=retries,
        sources=own_sources(policy),
    )


def _policy(config: Config) -> PolicyConfig:
    policy = for_engines(config.policy, resolve(config.policy))
    bounded = {
        family: Plugin(use=use.use, options={"requests_max": REQUESTS_MAX, **use.options})
        for family, use in asdict(policy).items()
        if isinstance(use, Plugin) and use.use == "slo-headroom"
    }
    fixed = {"scaling": Plugin(use="fixed-fleet"), "moves": Plugin(use="no-moves"), "streaming": _STREAMING}
    return replace(policy, **bounded, **fixed)
