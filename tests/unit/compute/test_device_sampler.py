"""The sampler of a device draws the tokens of the host's sampler, and reads the device once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from baton.compute.sampler import HostSampler
from baton.compute.torch.sampler import DeviceSampler, compute_rows, plan_rows
from baton.core.step import Slice
from baton.core.types import Sampling, TokenLogprob
from tests.seeds import Seeds
from tests.unit.compute.models import part_of

VOCAB = 331
EDGE_SHARE_MAX = 1e-4
"""The largest share of draws that may differ. Those lie within a rounding error of the edge between two tokens."""
ROUNDING = 5e-6
"""The largest difference of a log probability."""
CHOICES: dict[str, list[object]] = {
    "temperature": [0.0, 1e-6, 0.3, 1.0, 2.0],
    "top_p": [1e-9, 0.3, 0.9, 1.0, 1.0],
    "top_k": [0, 0, 1, 7, VOCAB, 1000],
    "min_p": [0.0, 0.0, 0.05, 0.5, 1.0],
    "presence_penalty": [0.0, 0.0, -1.0, 1.5],
    "frequency_penalty": [0.0, 0.0, -0.5, 0.7],
    "repetition_penalty": [1.0, 1.0, 0.5, 1.3],
    "logit_bias": [(), (), ((3, 100.0),), ((3, -100.0), (4, 2.0)), ((VOCAB + 5, 1.0),)],
    "bad_words": [(), (), ((3,),), ((5, 3), (4,)), ((1, 2, 3), (VOCAB + 5,))],
    "stop_token_ids": [(), (0,), (1, 5, VOCAB + 1)],
    "output_tokens_min": [0, 0, 3],
    "top_logprobs": [None, None, 0, 1, 20, VOCAB + 1],
}


@dataclass(frozen=True)
class Allowed:
    """Implements `AllowedTokens` with ready masks."""

    masks: tuple[bytes, ...]

    def rows(self) -> Sequence[bytes]:
        return self.masks


def random_part(numbers: random.Random) -> Slice:
    """Return a slice with random options, drafts and masks. Some masks are late, and some stop before the drafts."""
    sampling = Sampling(
        seed=numbers.getrandbits(63), **{name: numbers.choice(values) for name, values in CHOICES.items()}
    )
    prompt = [numbers.randrange(VOCAB) for _ in range(numbers.randint(1, 9))]
    output = [numbers.randrange(8) for _ in range(numbers.choice([0, 1, 5]))]
    drafts = numbers.choice([0, 0, 0, 1, 3])
    # Tokens that are drawn often, so that drafts are accepted.
    tokens = [*prompt, *output, *(numbers.choice([3, 4, 5]) for _ in range(drafts))]
    allowed = None
    if numbers.random() < 0.3:
        masks = [numbers.randbytes(-(-VOCAB // 8)) for _ in range(1 + drafts)]
        for place in range(drafts):
            draft = tokens[len(prompt) + len(output) + place]
            if not masks[place][draft // 8] >> draft % 8 & 1:
                del masks[place + 1 :]
                break
        allowed = Allowed(() if numbers.random() < 0.1 else tuple(masks))
    return part_of(tokens, [], sampling=sampling, prompt_tokens=len(prompt), drafts=drafts, allowed=allowed)


def random_logits(numbers: np.random.Generator, rows: int) -> torch.Tensor:
    """Return logits of several spreads. Some rows have many equal logits, or NaN."""
    spread = numbers.choice([0.0, 0.01, 1.0, 4.0, 9.0], (rows, 1))
    logits = (numbers.standard_normal((rows, VOCAB)) * spread).astype(np.float32)
    coarse = numbers.random(rows) < 0.2
    logits[coarse] = np.round(logits[coarse])
    logits[:, 3:6] += 2.0
    logits[numbers.random((rows, VOCAB)) < 0.01] = -np.inf
    logits[numbers.random((rows, VOCAB)) < 0.00005] = np.nan
    return torch.from_numpy(logits)


def compare_logprobs(one: TokenLogprob | None, other: TokenLogprob | None) -> None:
    """The same tokens in the same order; those whose values differ by a rounding error may change places."""
    if one is None or other is None:
        assert one is other
        return
    assert (one.token, len(one.top)) == (other.token, len(other.top))
    np.testing.assert_allclose(one.logprob, other.logprob, atol=ROUNDING)
    values = dict(one.top)
    for (mine, value), (theirs, other_value) in zip(one.top, other.top, strict=True):
        np.testing.assert_allclose(value, other_value, atol=ROUNDING)
        assert mine == theirs or abs(values[theirs] - value) < ROUNDING


@pytest.mark.parametrize("nucleus_tokens", [1024, 5])
def test_it_draws_the_tokens_of_the_host(nucleus_tokens: int, seeds: Seeds) -> None:
    """Random batches of all options together, drafts and masks included; with 5 tokens, most nuclei are too wide."""
    host, device = HostSampler(), DeviceSampler(nucleus_tokens)
    drawn = differing = 0
    for seed in range(1000 if seeds.deep else 40):
        numbers = random.Random(seed)
        parts = [random_part(numbers) for _ in range(numbers.randint(1, 24))]
        logits = random_logits(np.random.default_rng(seed), sum(1 + part.drafts for part in parts))
        kept = logits.clone()
        expected, found = host.draw(logits, parts), device.draw(logits, parts)
        assert torch.equal(logits, kept) or logits.isnan().any()
        for (one, failure), (other, reason) in zip(expected, found, strict=True):
            drawn += 1
            if failure or reason:
                assert failure == reason
            elif [token for token, _ in one] != [token for token, _ in other]:
                differing += 1
            else:
                for (_, mine), (_, theirs) in zip(one, other, strict=True):
                    compare_logprobs(mine, theirs)
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
