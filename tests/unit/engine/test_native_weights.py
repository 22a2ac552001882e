"""Weights that do not belong together are refused when the last of them come, not read past their end in a step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.core.errors import ModelError
from baton.engine.native.build import library_path
from baton.engine.native.library import NativeLibrary
from tests.unit.engine.native_fuzz import Engine, Shape, Weights


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
    shape.experts, shape.used, shape.shared = experts, used, False
    weights = Weights(shape, np.random.default_rng(1))
    weights.mlps = [weights.mlp(shape.intermediate) for _ in range(mlps)]
    weights.routers = [weights.router(scores, normalized=True)] * len(weights.routers)
    with pytest.raises(ModelError, match=words):
        Engine(NativeLibrary(library_path()), weights, 4, 1)
