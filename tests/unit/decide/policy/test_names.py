"""Every name makes a whole coordinator; what a configuration says itself wins over the name."""

from __future__ import annotations

import pytest

from baton.core.config import Plugin, PolicyChoice, PolicyConfig, load
from baton.core.errors import ConfigError
from baton.decide.control.build import build_coordinator, build_policies
from baton.decide.control.decision_log import LogHeader
from baton.decide.policy.policy_sets import POLICY_SETS, policy_set, resolve
from tests.unit.decide.policy.views import COST

NAMES = [
    "random",
    "round-robin",
    "least-load",
    "cache-aware-local",
    "cache-aware-global",
    "dynamo",
    "sglang",
    "llm-d",
    "splitwise",
    "distserve",
    "sarathi",
    "tetriinfer",
    "arrow",
    "mooncake",
    "mooncake-no-prediction",
    "vtc",
    "llumnix",
    "conserve",
    "ampd",
    "pla",
    "baton",
    "direct",
    "central",
    "pull",
    "first-token-by-decode",
]


def test_the_names_are_the_published_ones() -> None:
    assert sorted(POLICY_SETS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_a_coordinator(name: str) -> None:
    header = LogHeader(policy=policy_set(name), block_tokens=16)
    assert build_coordinator(header, build_policies(header.policy, COST)).live_requests == 0


def test_a_family_that_is_given_wins_over_the_name() -> None:
    config = load('[policy]\nname = "splitwise"\n[policy.placement]\nuse = "least-load"\n')
    chosen = resolve(config.policy)
    assert chosen.routing == POLICY_SETS["splitwise"].routing
    assert chosen.placement.use == "least-load"


def test_a_family_that_is_given_wins_also_where_it_is_what_plays_by_default() -> None:
    default = PolicyConfig()
    choice = f'[policy]\nname = "least-load"\n[policy.batching]\nuse = "{default.batching.use}"\n'
    chosen = resolve(load(choice).policy)
    assert chosen.batching == default.batching != POLICY_SETS["least-load"].batching
    assert chosen.streaming == POLICY_SETS["least-load"].streaming


def test_every_family_can_be_chosen_and_nothing_chosen_is_the_default() -> None:
    assert PolicyChoice.__struct_fields__ == PolicyConfig.__struct_fields__
    assert resolve(PolicyChoice()) == PolicyConfig() == policy_set("baton")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'splitwize'.*splitwise"):
        resolve(PolicyChoice(name="splitwize"))


def test_one_class_with_the_same_options_plays_several_families_as_one_object() -> None:
    pressure = Plugin(use="slo-headroom")
    policies = build_policies(PolicyConfig(admission=pressure, routing=pressure, placement=pressure), COST)
    assert policies.admission is policies.routing is policies.placement
    other = Plugin(use="slo-headroom", options={"mixing_ratio": 3.0})
    apart = build_policies(PolicyConfig(admission=pressure, routing=pressure, placement=other), COST)
    assert apart.placement is not apart.routing


def test_an_option_of_one_family_holds_for_all_that_share_the_policy() -> None:
    chosen = resolve(load("[policy.admission]\nuse = 'slo-headroom'\noptions = {requests_max = 7}\n").policy)
    assert chosen.routing.options == chosen.placement.options == {"requests_max": 7}
    policies = build_policies(chosen, COST)
    assert policies.admission is policies.routing is policies.placement


def test_two_values_of_one_shared_option_are_refused() -> None:
    given = PolicyChoice(
        admission=Plugin(use="slo-headroom", options={"requests_max": 7}),
        routing=Plugin(use="slo-headroom", options={"requests_max": 8}),
    )
    with pytest.raises(ConfigError, match=r"policy.routing.options.requests_max is 8.* sets it to 7.*give one value"):
        resolve(given)


def test_a_class_that_lacks_a_family_is_refused_though_it_plays_another() -> None:
    queue = Plugin(use="shortest-queue")
    with pytest.raises(ConfigError, match="shortest-queue is no PlacementPolicy: it lacks place"):
        build_policies(PolicyConfig(routing=queue, placement=queue), COST)
