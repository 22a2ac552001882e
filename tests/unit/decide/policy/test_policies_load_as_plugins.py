"""Every policy of the default configuration is built the way a user's own would be: by name, through its port."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.config import Plugin, PolicyConfig
from baton.core.errors import ConfigError
from baton.core.plugin import load_plugin
from baton.decide.kv.blocks import EvictionOrder
from baton.decide.policy.admission import AdmissionPolicy
from baton.decide.policy.batching import BatchingPolicy
from baton.decide.policy.fairness import FairnessPolicy
from baton.decide.policy.placement import PlacementPolicy
from baton.decide.policy.routing import RoutingPolicy

DEFAULTS = PolicyConfig()
FAMILIES: list[tuple[Plugin, type[Any]]] = [
    (DEFAULTS.admission, AdmissionPolicy),
    (DEFAULTS.routing, RoutingPolicy),
    (DEFAULTS.placement, PlacementPolicy),
    (DEFAULTS.fairness, FairnessPolicy),
    (DEFAULTS.batching, BatchingPolicy),
    (DEFAULTS.eviction, EvictionOrder),
]


@pytest.mark.parametrize(("plugin", "port"), FAMILIES, ids=lambda value: getattr(value, "__name__", value))
def test_the_default_of_each_family_fills_its_port(plugin: Plugin, port: type[Any]) -> None:
    """A port that is no runtime protocol could not be checked at all: loading would die of a TypeError."""
    assert isinstance(load_plugin(plugin.use, plugin.options, expects=port), port)


def test_a_policy_of_the_wrong_family_is_refused_by_the_verb_that_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"lru is no RoutingPolicy: it lacks route"):
        load_plugin("lru", {}, expects=RoutingPolicy)


def test_options_reach_the_policy() -> None:
    made = load_plugin("bounded-queue", {"requests_max": 7}, expects=AdmissionPolicy)
    assert getattr(made, "requests_max", None) == 7
