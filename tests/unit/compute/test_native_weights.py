"""Weights of contradicting sizes are refused when they are set, before the library reads past their end."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import numpy as np
import pytest

from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary, NativeMatrix, NativeModel
from baton.core.errors import ModelError
from tests.unit.compute.native_fuzz import Engine
from tests.unit.compute.native_models import BFLOAT16, DENSE, FLOAT32, Shape, Weights

EXTREMES = (0, -1, -(1 << 31), (1 << 31) - 1)
WRONG_INDICES = (-1, 2, *EXTREMES[2:])
"""The random models have two layers."""


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
    words = f"0 projections of latents; it should have {shape.heads}"
    with pytest.raises(ModelError, match=words):
        Engine(NativeLibrary(library_path()), weights, 4, 1)


def _refuses(library: NativeLibrary, weights: Weights) -> bool:
    try:
        engine = Engine(library, weights, 4, 1)
    except ModelError:
        return True
    library.free(engine.handle)
    return False


def _wrong_numbers(matrix: NativeMatrix) -> Iterator[tuple[ctypes.Structure, str, object]]:
    """List changes of a matrix that no model allows: (structure, field, value)."""
    for name in ("rows", "inputs"):
        size = getattr(matrix, name)
        for value in (size - 1, size + 1, *EXTREMES):
            yield matrix, name, value
    for code in (99, -1):
        yield matrix, "dtype", code
    yield matrix, "data", None
    if matrix.scales is not None:
        yield matrix, "scales", None


def _wrong_weights(weights: Weights) -> Iterator[tuple[ctypes.Structure, str, object]]:
    layer, mlp = weights.layers[0], weights.mlps[0]
    matrices = [layer.qkv, layer.o, mlp.gate_up, mlp.down, weights.head]
    if weights.embedding is not None:
        matrices.append(weights.embedding)
    for latent in weights.latents[:1]:
        matrices += [latent.keys, latent.values]
        yield latent, "kv_norm", None
        if latent.queries.data is not None:
            matrices.append(latent.queries)
            yield latent, "q_norm", None
    for matrix in matrices:
        yield from _wrong_numbers(matrix)
    for name in ("input_norm", "mlp_norm"):
        yield layer, name, None
    yield layer, "window", -1
    for router in weights.routers[:1]:
        for value in (router.scores.inputs - 1, router.scores.inputs + 1, *EXTREMES):
            yield router.scores, "inputs", value
        for value in EXTREMES:
            yield router.scores, "rows", value
            yield router, "experts", value
        yield router.scores, "data", None


@pytest.mark.parametrize("seed", range(12))
def test_any_wrong_shape_is_refused(seed: int) -> None:
    """Every number and pointer of the weights of a random model, changed to each kind of invalid value."""
    rng = random.Random(seed)
    shape = Shape.draw(rng)
    if seed % 3 == 0:
        shape.draw_latent(rng)
    weights, library = Weights(shape, np.random.default_rng(seed)), NativeLibrary(library_path())
    library.free(Engine(library, weights, 4, 1).handle)
    for structure, name, value in list(_wrong_weights(weights)):
        before = getattr(structure, name)
        setattr(structure, name, value)
        assert _refuses(library, weights), f"{type(structure).__name__}.{name} = {value}, not {before}, passes: {shape}"
        setattr(structure, name, before)


@pytest.mark.parametrize("name", [name for name, kind in NativeModel._fields_ if kind is ctypes.c_int32])
def test_any_wrong_size_of_a_model_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, library = Weights(Shape.draw(random.Random(1)), np.random.default_rng(1)), NativeLibrary(library_path())
    create = library.new
    for value in (9, *EXTREMES[1:]) if name in ("dtype", "kv_dtype") else EXTREMES:

        def create_wrong(model: NativeModel, value: int = value) -> int:
            setattr(model, name, value)
            return create(model)

        monkeypatch.setattr(library, "new", create_wrong)
        with pytest.raises(ModelError):
            Engine(library, weights, 4, 1)


def test_a_layer_that_does_not_exist_is_refused() -> None:
    weights, library = Weights(Shape.draw(random.Random(1)), np.random.default_rng(1)), NativeLibrary(library_path())
    engine = Engine(library, weights, 4, 1)
    target = library.weights(engine.handle)
    for index in WRONG_INDICES:
        with pytest.raises(ModelError, match="the index of a layer is"):
            target.set_layer(index, weights.layers[0])
        with pytest.raises(ModelError, match="the index of a layer is"):
            target.add_mlp(index, weights.mlps[0])
    with pytest.raises(ModelError, match="the weights are complete"):
        target.add_mlp(0, weights.mlps[0])
    library.free(engine.handle)


@pytest.mark.parametrize("number", [FLOAT32, BFLOAT16])
def test_a_nan_score_is_not_taken_for_weight_0(number: int) -> None:
    """A visible key that is NaN makes the logits NaN, on every instruction set; the request beside it is unchanged."""
    shape = Shape(
        heads=2, kv_heads=1, head_dim=32, hidden=64, intermediate=64, vocab=33, windows=[0, 0], number=number,
        kv_number=number, block_tokens=16, form=DENSE, biased=False, normed=False, steep=1.0,
    )  # fmt: skip
    weights = Weights(shape, np.random.default_rng(1))
    for name in NativeLibrary(library_path()).usable_kernels():
        engine = Engine(NativeLibrary(library_path(), name), weights, 4, 2)
        parts = [([1, 2, 3], 0, [0]), ([4, 5, 6], 0, [1])]
        engine.step(parts)
        further = [([7], 3, [0]), ([8], 3, [1])]
        expected = engine.step(further)
        (first_key, *_) = engine.slots(1, 0, [0])
        engine.arena[first_key] = 0xFF
        found = engine.step(further)
        assert np.isnan(found[0]).all(), f"{name} {found[0]}"
        assert (found[1] == expected[1]).all()
        engine.library.free(engine.handle)
