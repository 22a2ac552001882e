"""The sampler of a device draws the tokens of the host's sampler, and reads the device once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.compute.sampler import HostSampler
from baton.compute.torch.sampler import DeviceSampler, compute_rows, plan_rows
from baton.core.types import Sampling
from tests.sampler_cases import VOCAB, compare_draws, compare_logprobs, random_part
from tests.seeds import Seeds
from tests.unit.compute.steps import part_of

EDGE_SHARE_MAX = 1e-4
"""The largest share of draws that may differ. Those lie within a rounding error of the edge between two tokens."""


@pytest.mark.parametrize("nucleus_tokens", [1024, 5])
def test_it_draws_the_tokens_of_the_host(nucleus_tokens: int, seeds: Seeds) -> None:
    """Random batches of all options together, drafts and masks included; with 5 tokens, most nuclei are too wide."""
    counts = [compare_draws(seed, nucleus_tokens) for seed in range(1000 if seeds.deep else 40)]
    drawn, differing = map(sum, zip(*counts, strict=True))
    assert differing <= EDGE_SHARE_MAX * drawn


@pytest.mark.parametrize("options", [{"top_k": 40}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05}, {}])
def test_it_draws_the_tokens_of_the_host_from_a_large_vocabulary(options: dict[str, float], seeds: Seeds) -> None:
    """A vocabulary that is no multiple of a run; every row has a seed of its own."""
    rows = 1000 if seeds.deep else 100
    logits = torch.from_numpy((np.random.default_rng(5).standard_normal((rows, 20_011)) * 3).astype(np.float32))
    parts = [part_of([1], [], sampling=Sampling(seed=seed, **options)) for seed in range(rows)]
    expected, found = HostSampler().draw(logits, parts), DeviceSampler().draw(logits, parts)
    assert sum(one != other for one, other in zip(expected, found, strict=True)) <= 1


def test_log_probabilities_of_given_tokens_are_those_of_the_host() -> None:
    logits = torch.from_numpy((np.random.default_rng(2).standard_normal((9, VOCAB)) * 4).astype(np.float32))
    tokens = list(range(3, 12))
    for count in (0, 4, VOCAB + 3):
        expected, found = (sampler.logprobs(logits, tokens, count) for sampler in (HostSampler(), DeviceSampler()))
        for one, other in zip(expected, found, strict=True):
            compare_logprobs(one, other)


def test_its_computation_never_waits_for_the_device() -> None:
    """On tensors without data: an operation fails if its result has to be read, or mixes two devices."""
    numbers = random.Random(0)
    parts = [random_part(numbers) for _ in range(64)]
    views = [part.at(0) for part in parts]
    masks = [next(iter(view.allowed.rows()), None) if view.allowed is not None else None for view in views]
    plan = plan_rows(views, masks, VOCAB, 64)
    assert plan.candidates == VOCAB
    assert all(plan.sizes)
    logits = torch.empty((len(views), VOCAB), device="meta")
    packed = torch.empty(len(plan.packed), dtype=torch.int64, device="meta")
    found = compute_rows(logits, plan, packed)
    with pytest.raises(NotImplementedError):
        logits.isnan().nonzero()
    assert (found.device.type, found.shape) == ("meta", (64, plan.columns))
