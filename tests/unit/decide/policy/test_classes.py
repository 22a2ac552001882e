"""Routes to service classes, the rights of keys, and the problems of a configuration."""

from __future__ import annotations

import pytest

from baton.core.class_config import CLASSES_MAX, ClassConfig, RouteConfig, class_problems
from baton.core.config import Config, Plugin, PolicyChoice, load
from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.decide.policy.classes import ClassTable, RouteFacts
from baton.decide.policy.policy_sets import policy_of

GOLD = ClassConfig(name="gold", priority=-2, prefill_ratio=0.25, decode_ratio=0.5, ttft_slo_s=1.0, tpot_slo_s=0.1)
SILVER = ClassConfig(name="silver", priority=-1, prefill_ratio=0.25)
BULK = ClassConfig(name="bulk", priority=5)
TABLE = ClassTable(
    (GOLD, SILVER, BULK),
    (
        RouteConfig(service_class="gold", headers={"X-Tier": "gold"}),
        RouteConfig(service_class="silver", tenant="acme", path="/v1/embeddings"),
        RouteConfig(service_class="bulk", key="batch"),
    ),
    "silver",
)


def name_of(facts: RouteFacts) -> str:
    service = TABLE.choose(facts).service
    assert service is not None
    return service.name


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (RouteFacts(headers={"x-tier": "gold"}, key="batch"), "gold"),
        (RouteFacts(headers={"x-tier": "lead"}, key="batch"), "bulk"),
        (RouteFacts(tenant="acme", path="/v1/embeddings", key="batch"), "silver"),
        (RouteFacts(tenant="acme", path="/v1/completions", key="batch"), "bulk"),
        (RouteFacts(), "silver"),
    ],
)
def test_the_first_route_whose_conditions_all_hold_gives_the_class(facts: RouteFacts, expected: str) -> None:
    assert name_of(facts) == expected


def test_a_class_has_its_targets_and_leaves_room_to_more_urgent_ones() -> None:
    gold, bulk = TABLE.choose(RouteFacts(headers={"x-tier": "gold"})), TABLE.choose(RouteFacts(key="batch"))
    assert gold.slo == Slo(ttft_s=1.0, tpot_s=0.1)
    assert bulk.slo is None
    assert gold.service is not None
    assert bulk.service is not None
    assert (gold.service.step_ratio, bulk.service.step_ratio) == (1.0, 0.5)
    assert (gold.service.urgent_ttft_s, bulk.service.urgent_ttft_s) == (None, 1.0)


def test_a_client_gets_no_class_that_its_key_does_not_allow() -> None:
    asks = RouteFacts(key="a", headers={"x-tier": "gold"})
    assert not TABLE.is_allowed(asks, None), "only its own header asks for it"
    assert TABLE.is_allowed(asks, {"gold"})
    assert TABLE.is_allowed(RouteFacts(key="batch"), None), "a route gives it by its key"
    assert not TABLE.is_allowed(RouteFacts(key="batch"), {"gold"})
    assert ClassTable().is_allowed(asks, set()), "there are no classes"


def test_every_problem_is_told_with_the_nearest_name() -> None:
    classes = (GOLD, GOLD, ClassConfig(name="no good", ttft_slo_s=1.0, decode_ratio=0.6))
    found = "\n".join(class_problems(classes, (RouteConfig(service_class="glod"),), "gone"))
    assert "2 classes are named 'gold'" in found
    assert "classes[2].name is 'no good', but must have" in found
    assert "classes[2] needs both ttft_slo_s and tpot_slo_s" in found
    assert "decode_ratio of all classes add up to 1.6" in found
    assert "routes[0].service_class is 'glod', which is no class (did you mean 'gold'?)" in found
    assert "default_class is 'gone'" in found
    many = [ClassConfig(name=f"class-{number}") for number in range(CLASSES_MAX + 1)]
    assert class_problems(many, (), "") == ["there are 17 classes, at most 16 are allowed: remove 1"]


def test_a_configuration_file_declares_them() -> None:
    config = load('default_class = "a"\n[[classes]]\nname = "a"\n[[routes]]\nservice_class = "a"\nkey = "k"\n')
    assert (config.classes[0].name, config.routes[0].key, config.problems()) == ("a", "k", [])
    with pytest.raises(ConfigError, match="did you mean 'priority'"):
        load('[[classes]]\nname = "a"\nprioritty = 1\n')


def test_the_reserves_of_the_classes_keep_workers_in_their_roles() -> None:
    roles = policy_of(Config(classes=(GOLD, SILVER)), tenants=1).roles
    assert roles.options == {"prefill_ratio_min": 0.5, "decode_ratio_min": 0.5}
    own = Plugin(use="demand-roles", options={"decode_ratio_min": 0.0})
    chosen = policy_of(Config(classes=(GOLD,), policy=PolicyChoice(roles=own)), tenants=1).roles
    assert chosen.options["decode_ratio_min"] == 0.0
    static = Plugin(use="static-roles")
    assert policy_of(Config(classes=(GOLD,), policy=PolicyChoice(roles=static)), tenants=1).roles == static


def test_classes_and_tenants_use_the_fair_queue() -> None:
    fcfs = PolicyChoice(fairness=Plugin(use="fcfs"))
    assert policy_of(Config(), tenants=1).fairness.use == "slo-order"
    assert policy_of(Config(), tenants=2).fairness.use == "vtc"
    assert policy_of(Config(policy=fcfs), tenants=2).fairness.use == "fcfs"
    assert policy_of(Config(classes=(GOLD,)), tenants=1).fairness.use == "vtc"


@pytest.mark.parametrize("fairness", [Plugin(use="fcfs"), Plugin(use="slo-order", options={"overtake_gap": 3.0})])
def test_classes_refuse_a_fairness_policy_that_counts_no_service(fairness: Plugin) -> None:
    with pytest.raises(ConfigError, match=f"policy.fairness is '{fairness.use}', but classes need .* use 'vtc'"):
        policy_of(Config(classes=(GOLD,), policy=PolicyChoice(fairness=fairness)), tenants=1)


def test_classes_take_any_fairness_policy_that_counts_service() -> None:
    own = Plugin(use="vtc", options={"predicted_ratio": 1.0})
    assert policy_of(Config(classes=(GOLD,), policy=PolicyChoice(fairness=own)), tenants=1).fairness == own
