"""Random batches of all sampling options, drawn by the host's sampler and by that of a device, on a CPU or a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.compute.sampler import HostSampler
from baton.compute.torch.sampler import DeviceSampler
from baton.core.step import Slice
from baton.core.types import Sampling, TokenLogprob
from tests.unit.compute.steps import part_of

VOCAB = 331
ROUNDING, ROUNDING_RATIO = 5e-6, 2e-7
"""The largest difference of a log probability, absolute and as a share of it: two steps of float32."""
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
    """The same tokens in the same order; those whose values differ by a rounding error may change places.

    So may the last of the likely tokens and the first that is left out.
    """
    if one is None or other is None:
        assert one is other
        return
    assert (one.token, len(one.top)) == (other.token, len(other.top))
    np.testing.assert_allclose(one.logprob, other.logprob, atol=ROUNDING, rtol=ROUNDING_RATIO)
    values, last = dict(one.top), min((value for _, value in one.top), default=0.0)
    for (mine, value), (theirs, other_value) in zip(one.top, other.top, strict=True):
        np.testing.assert_allclose(value, other_value, atol=ROUNDING, rtol=ROUNDING_RATIO)
        assert mine == theirs or abs(values.get(theirs, last) - value) < ROUNDING


def compare_draws(seed: int, nucleus_tokens: int, device: str = "cpu") -> tuple[int, int]:
    """Draw one random batch by both samplers. Return the number of its slices, and of those with other tokens.

    A draw differs if it lies within a rounding error of the edge between two tokens.
    """
    numbers = random.Random(seed)
    parts = [random_part(numbers) for _ in range(numbers.randint(1, 24))]
    logits = random_logits(np.random.default_rng(seed), sum(1 + part.drafts for part in parts))
    placed, differing = logits.to(device, copy=True), 0
    expected, found = HostSampler().draw(logits, parts), DeviceSampler(nucleus_tokens).draw(placed, parts)
    assert torch.equal(placed.cpu(), logits) or logits.isnan().any()
    for (one, failure), (other, reason) in zip(expected, found, strict=True):
        if failure or reason:
            assert failure == reason
        elif [token for token, _ in one] != [token for token, _ in other]:
            differing += 1
        else:
            for (_, mine), (_, theirs) in zip(one, other, strict=True):
                compare_logprobs(mine, theirs)
    return len(parts), differing
