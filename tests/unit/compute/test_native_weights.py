"""Weights of contradicting sizes are refused when the last ones are set, before a step reads past their end."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary
from baton.core.errors import ModelError
from tests.unit.compute.native_fuzz import Engine
from tests.unit.compute.native_models import Shape, Weights


@pytest.mark.parametrize(
    ("experts", "used", "mlps", "scores", "words"),
    [
        (0, 0, 2, 0, "a layer without experts has 2 MLPs"),
        (5, 2, 4, 5, "a layer of 5 experts, 2 of them for each token, has 4 MLPs and 5 scores"),
        (5, 2, 7, 5, "has 7 MLPs and 5 scores"),
        (5, 6, 5, 5, "a layer of 5 experts, 6 of them for each token"),
        (5, 2, 6, 4, "has 6 MLPs and 4 scores"),
        (5, 2, 5, 6, "has 5 MLPs and 6 scores"),
    ],
)
def test_a_router_and_its_experts_that_do_not_match_are_refused(
    experts: int, used: int, mlps: int, scores: int, words: str
) -> None:
    shape = Shape.draw(random.Random(1))
    shape.experts, shape.used, shape.shared, shape.groups, shape.groups_used = experts, used, False, 1, 1
    weights = Weights(shape, np.random.default_rng(1))
    weights.mlps = [weights.mlp(shape.intermediate) for _ in range(mlps)]
    weights.routers = [weights.router(scores, normalized=True)] * len(weights.routers)
    with pytest.raises(ModelError, match=words):
        Engine(NativeLibrary(library_path()), weights, 4, 1)


@pytest.mark.parametrize(
    ("groups", "used_groups", "best"), [(4, 2, 1), (0, 1, 1), (3, 4, 1), (3, 0, 1), (3, 1, 1), (6, 6, 2), (3, 3, 0)]
)
def test_groups_that_the_experts_do_not_fill_are_refused(groups: int, used_groups: int, best: int) -> None:
    """Six experts, three per token."""
    shape = Shape.draw(random.Random(1))
    shape.experts, shape.used, shape.shared, shape.groups, shape.groups_used = 6, 3, False, 1, 1
    weights = Weights(shape, np.random.default_rng(1))
    for router in weights.routers:
        router.groups, router.groups_used, router.group_best = groups, used_groups, best
    words = f"3 of 6 experts cannot come from {used_groups} of {groups} groups by the best {best} of each"
    with pytest.raises(ModelError, match=words):
        Engine(NativeLibrary(library_path()), weights, 4, 1)


def test_attention_of_other_sizes_than_the_model_is_refused() -> None:
    """Latent attention without its projections cannot be computed."""
    shape = Shape.draw(random.Random(1))
    shape.draw_latent(random.Random(1))
    weights = Weights(shape, np.random.default_rng(1))
    weights.latents.pop()
    words = f"0 projections of latents; it should have {shape.attended[0]} and {shape.heads}"
    with pytest.raises(ModelError, match=words):
        Engine(NativeLibrary(library_path()), weights, 4, 1)
