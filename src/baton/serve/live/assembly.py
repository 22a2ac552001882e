"""Build the parts of one model: the cluster with its policies, the driver, and the server's own host."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.models.fingerprint import kv_identity
from baton.core.config import Config, Plugin, PolicyConfig, Topology
from baton.core.errors import ConfigError
from baton.core.keys import read_keys
from baton.core.plugin import load_plugin
from baton.core.types import HostId, Slo
from baton.decide.control.build import build_coordinator, build_policies
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import HostAdded
from baton.decide.control.decision_log import LogHeader
from baton.decide.control.guarded_eviction import eviction_maker
from baton.decide.control.host_pools import PoolRules
from baton.decide.control.retries import RetryRules
from baton.decide.cost.load import inline_files, load_cost
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.spill import SpillRules
from baton.decide.kv.window import PromptRules, Window
from baton.decide.policy.batching import BatchingPolicy
from baton.decide.policy.policy_sets import own_sources, plugin_names, policy_of
from baton.serve.host.build import (
    Computing,
    HostParts,
    batch_limits,
    build_host,
    choose_computing,
    limit_context,
    priced,
)
from baton.serve.host.sizing import HostShare
from baton.serve.host.spill import add_spill
from baton.serve.host.tier_opening import check_tiers, fingerprint_of, open_tiers
from baton.serve.host.worker_link import HostLauncher
from baton.serve.live.driver import Driver
from baton.serve.live.gateway import LiveGateway
from baton.serve.live.history import History
from baton.serve.live.log_thread import open_log
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.tiers import LiveTiers, OwnTiers
from baton.serve.live.waiting import Waits
from baton.serve.worker.step_log import prepare_step_log

HOST = HostId("host-0")
_BLOCKS_MAX = 2**31
"""Cache quota of a tenant for which none is set: more blocks than any host has."""

log = logging.getLogger("baton.server")


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one model of a server, before any process is started."""

    config: Config
    card: ModelCard
    driver: Driver
    gateway: LiveGateway
    metrics: Metrics
    history: History
    computing: Computing
    own: HostParts | None
    """The server's own host. None: all workers are on hosts that join, or are servers of another engine."""
    given_cost: dict[str, Any]
    """The section `cost` as configured. Without estimated prices, because joining hosts estimate their own."""
    own_tiers: OwnTiers | None = None
    """The tiers below the arena of the server's own host."""
    launcher: HostLauncher | None = None
    """Starts hosts on other machines. None: hosts join by themselves."""


def assemble(config: Config, card: ModelCard, share: HostShare | None = None) -> Parts:
    """Build all parts and reserve the arena; start no process. Raises ConfigError or ArenaError.

    `share`: the part of this host for the model. None: all of it.
    """
    policy = with_quotas(policy_of(config, tenants=config.http.tenants()), config.http.key_file)
    _check_batching(policy.batching)
    computing = choose_computing(config, card, share=share)
    given_cost = inline_files(config.cost, folder=Path())
    config = priced(msgspec.structs.replace(config, cost=given_cost), card, computing)
    layout = computing.layout
    card = limit_context(config, card)
    is_alone = config.engines.is_used or (config.topology == Topology() and config.hosts.expected > 0)
    if config.step_log and not is_alone:
        prepare_step_log(Path(config.step_log))
    own = None if is_alone else build_host(config, card, computing, HOST)
    spill: SpillRules | None = None
    if config.kv.spill.bytes:
        if own is None:
            raise ConfigError("kv.spill is set, but the server has no workers of its own: leave it out")
        own, spill = add_spill(own, config, card, computing)
    prompts = PromptRules(
        hash_tokens=config.kv.block_tokens,
        window=window_of(card),
        growth_tokens=batch_limits(config).growth_tokens,
        preemption=config.kv.preemption,
        spill=spill,
    )
    header = _header(policy, config, layout, prompts)
    metrics, survival = Metrics(), config.survival
    driver = Driver(
        _build_cluster(header, config),
        layout,
        metrics,
        waits=Waits(survival.wait_s, survival.start_s),
        copy_s=config.hosts.copy_s,
        log_writer=open_log(config, header),
    )
    own_tiers: OwnTiers | None = None
    if own is not None:
        own_tiers = _open_tiers(config, card, computing, own, driver.tiers)
        below = own_tiers.rules if own_tiers is not None else ()
        driver.add_host(HostAdded(own.id, own.blocks_total, layout, below, own.workers_max))
    gateway = LiveGateway(card, driver, policy_names=plugin_names(policy), slo=_default_slo(config))
    history = History(gateway, driver.recorder)
    return Parts(config, card, driver, gateway, metrics, history, computing, own, given_cost, own_tiers)


def with_quotas(policy: PolicyConfig, key_file: str) -> PolicyConfig:
    """Return the policies with the cache quotas of a key file added. `key_file` is empty if there is no file."""
    entries = read_keys(Path(key_file)).keys if key_file else ()
    quotas: dict[str, int] = {}
    for entry in entries:
        if entry.limits.kv_blocks_max is not None:
            quotas[entry.tenant] = max(entry.limits.kv_blocks_max, quotas.get(entry.tenant, 0))
    if not quotas:
        return policy
    given = policy.eviction
    if given.use == "tenant-quota":
        options = given.options | {"tenants": dict(given.options.get("tenants", {})) | quotas}
    else:
        options = {"blocks_max": _BLOCKS_MAX, "tenants": quotas, "order": given.use, "order_options": given.options}
    return msgspec.structs.replace(policy, eviction=Plugin(use="tenant-quota", options=options))


def window_of(card: ModelCard) -> Window | None:
    """Return the model's attention window. None: at least one layer attends to all tokens."""
    return None if card.window_tokens is None else Window(tokens=card.window_tokens)


def _build_cluster(header: LogHeader, config: Config) -> Cluster:
    """Build the cluster with the configured policies. Raises ConfigError if a policy is invalid."""
    policies = build_policies(header.policy, load_cost(config.cost, folder=Path()).cost)
    eviction = eviction_maker(header.policy.eviction, partial(log.error, "%s"))
    rules = PoolRules(eviction=eviction, prompts=header.prompts, handover_bytes=header.handover_bytes)
    return Cluster(build_coordinator(header, policies), rules)


def _header(policy: PolicyConfig, config: Config, layout: KVLayout, prompts: PromptRules) -> LogHeader:
    survival = config.survival
    return LogHeader(
        policy=policy,
        block_tokens=layout.block_tokens,
        cost=config.cost,
        prompts=prompts,
        queue_s=config.limits.queue_s or None,
        retries=RetryRules(
            attempts_max=survival.attempts_max, per_minute=survival.retries_per_minute, ratio=survival.retry_ratio
        ),
        handover_bytes=config.hosts.handover_bytes,
        scaling=config.launcher.rules(),
        sources=own_sources(policy),
    )


def _open_tiers(
    config: Config, card: ModelCard, computing: Computing, own: HostParts, live: LiveTiers
) -> OwnTiers | None:
    check_tiers(config.tiers)
    if not config.tiers:
        return None
    fingerprint = fingerprint_of(kv_identity(card), computing.layout, computing.precision_key)
    return OwnTiers(live, own.id, open_tiers(config.tiers, layout=computing.layout, fingerprint=fingerprint))


def _check_batching(plugin: Plugin) -> None:
    """Raise ConfigError if the batching policy is invalid, before workers start and fail on it."""
    load_plugin(plugin.use, plugin.options, expects=BatchingPolicy)


def _default_slo(config: Config) -> Slo | None:
    ttft_s, tpot_s = config.slo.ttft_s, config.slo.tpot_s
    return None if ttft_s is None or tpot_s is None else Slo(ttft_s=ttft_s, tpot_s=tpot_s)
