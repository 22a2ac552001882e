"""Sampling is reproducible, follows the sampling options, and equals a simple reference."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.compute.sampler import NAN_SCORES, HostSampler, Sampler, largest, sample, uniform
from baton.compute.torch.sampler import DeviceSampler
from baton.core.step import Slice
from baton.core.types import Sampling
from tests.unit.compute.models import part_of

VOCAB = 40
SAMPLERS: dict[str, tuple[Sampler, str]] = {
    "numpy": (HostSampler(), "cpu"),
    "torch": (DeviceSampler(), "cpu"),
    "narrow": (DeviceSampler(nucleus_tokens=3), "cpu"),
}
"""Samplers, and the places of their logits. Logits on a GPU are sampled by torch."""
if torch.cuda.is_available():
    SAMPLERS["cuda"] = (DeviceSampler(), "cuda")
rows = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB).map(
    lambda values: np.array(values, dtype=np.float32)
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 100.0),), ((3, -100.0), (4, 2.0)), ((VOCAB + 5, 1.0),)]),
    bad_words=st.sampled_from([(), ((3,),), ((5, 3), (4,)), ((1, 2, 3), (VOCAB + 5,))]),
    stop_token_ids=st.sampled_from([(), (0,), (1, 5, VOCAB + 1)]),
    output_tokens_min=st.sampled_from([0, 3]),
    seed=st.integers(0, 1 << 63),
)


def _sampled(sampler: str, logits: np.ndarray, parts: list[Slice]) -> list[int]:
    """Return a token of each slice. logits: [slices, vocab]."""
    drawing, device = SAMPLERS[sampler]
    return [drawn[0][0] for drawn, _ in drawing.draw(torch.from_numpy(logits).to(device), parts)]


def _draw(sampler: str, logits: np.ndarray, tokens: list[int], prompt_tokens: int, sampling: Sampling) -> int:
    return _sampled(sampler, logits[None], [part_of(tokens, [], sampling=sampling, prompt_tokens=prompt_tokens)])[0]


def _oracle(
    logits: np.ndarray, tokens: list[int], prompt_tokens: int, sampling: Sampling
) -> tuple[list[float], list[int]]:
    """Return weights by id, and the allowed ids, in plain Python."""
    scores = [float(value) for value in logits]
    for token in set(tokens):
        r = sampling.repetition_penalty
        scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    for token, count in Counter(tokens[prompt_tokens:]).items():
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    output = tokens[prompt_tokens:]
    for token, bias in sampling.logit_bias:
        if token < VOCAB:
            scores[token] += bias
    for *before, last in sampling.bad_words:
        if last < VOCAB and output[len(output) - len(before) :] == before and len(output) >= len(before):
            scores[last] = -math.inf
    if len(tokens) - prompt_tokens < sampling.output_tokens_min:
        for token in sampling.stop_token_ids:
            if token < VOCAB:
                scores[token] = -math.inf
    best = max(scores)
    if sampling.temperature == 0:
        return [], [scores.index(best)]
    weights = [math.exp((score - best) / sampling.temperature) for score in scores]
    order = sorted(range(VOCAB), key=lambda token: (-weights[token], token))
    order = order[: sampling.top_k] if sampling.top_k else order
    mass, kept, above = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if not kept or above < sampling.top_p * mass:
            kept.append(token)
        above += weights[token]
    return weights, [token for token in kept if weights[token] >= sampling.min_p or token == kept[0]]


@pytest.mark.parametrize("sampler", SAMPLERS)
@given(logits=rows, prompt=prompts, output=prompts, sampling=samplings)
def test_sampled_tokens_are_allowed_by_the_reference(
    sampler: str, logits: np.ndarray, prompt: list[int], output: list[int], sampling: Sampling
) -> None:
    """All options together. The reference sums in another order, so a token at the edge may differ."""
    tokens = [*prompt, *output]
    drawn = _draw(sampler, logits, tokens, len(prompt), sampling)
    weights, allowed = _oracle(logits, tokens, len(prompt), sampling)
    if sampling.temperature == 0.0:
        assert drawn == allowed[0]
    else:
        edge = min(weights[token] for token in allowed) * (1 - 1e-4)
        assert drawn in allowed or weights[drawn] >= edge


@pytest.mark.parametrize("sampler", SAMPLERS)
@given(logits=rows, tokens=prompts, sampling=samplings, others=st.lists(st.tuples(rows, samplings), max_size=4))
def test_a_sample_depends_only_on_its_row(
    sampler: str, logits: np.ndarray, tokens: list[int], sampling: Sampling, others: list[tuple[np.ndarray, Sampling]]
) -> None:
    """The same row, seed and position give the same token at any place of any batch."""
    alone = _draw(sampler, logits, tokens, 1, sampling)
    mine = part_of(tokens, [], sampling=sampling, prompt_tokens=1)
    beside = [part_of([1, 2], [], sampling=other, prompt_tokens=1) for _, other in others]
    batch = np.stack([*(row for row, _ in others), logits, *(row for row, _ in others)])
    assert _sampled(sampler, batch, [*beside, mine, *beside])[len(others)] == alone


def test_draws_follow_the_distribution() -> None:
    """5,000 positions: each token's share is within four standard deviations of its probability."""
    logits = np.random.default_rng(0).standard_normal(8, dtype=np.float32)
    expected = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    count = 5_000
    parts = [part_of([0] * (2 + i % 7), [], sampling=Sampling(temperature=0.8, seed=i)) for i in range(count)]
    drawn = Counter(token for token, _ in sample(np.broadcast_to(logits, (count, 8)), parts))
    for token, share in enumerate(expected.tolist()):
        assert abs(drawn[token] / count - share) < 4 * math.sqrt(share * (1 - share) / count)


def test_position_and_seed_both_change_the_draw() -> None:
    """The generator has no state: it is a function, spread evenly over [0, 1)."""
    values = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02


@pytest.mark.parametrize("count", [0, 1, 3, VOCAB, 100])
def test_largest_breaks_ties_by_id(count: int) -> None:
    scores = np.array([1.0, 3.0, 3.0, 2.0] * 10, dtype=np.float32)
    values, ids = largest(scores, count)
    order = sorted(range(VOCAB), key=lambda token: (-float(scores[token]), token))[:count]
    assert ids.tolist() == order
    assert values.tolist() == [float(scores[token]) for token in order]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_greedy_takes_the_lowest_id_among_equals(sampler: str) -> None:
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[:, [7, 9]] = 1.0
    plain = part_of([1], [], sampling=Sampling(temperature=0.0))
    biased = part_of([1], [], sampling=Sampling(temperature=0.0, logit_bias=((30, 0.5),)))
    assert _sampled(sampler, logits, [plain, biased]) == [7, 7]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.05}, {"top_p": 0.95}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}])
def test_sampling_from_a_large_vocabulary_equals_sorting(
    sampler: str, spread: float, options: dict[str, float]
) -> None:
    """Runs and buckets give the result of sorting: for equal, nearly equal, and very unequal weights."""
    logits = (np.random.default_rng(3).standard_normal(20_011) * spread).astype(np.float32)
    weights = np.exp((logits - logits.max()).astype(np.float64))
    order = np.argsort(-weights, kind="stable")[: int(options.get("top_k", 0)) or None]
    above = np.cumsum(weights[order]) - weights[order]
    kept = order[above < options.get("top_p", 1.0) * weights[order].sum()]
    kept = np.sort(kept) if "top_k" not in options else kept
    ends = np.cumsum(weights[kept])
    for seed in range(12):
        drawn = _draw(sampler, logits, [1], 1, Sampling(temperature=1.0, seed=seed, **options))
        expected = int(np.searchsorted(ends, uniform(seed, 1) * ends[-1], side="right"))
        near = kept[max(0, expected - 1) : expected + 2]  # float32 weights: a draw at an edge may fall on either side
        assert drawn in near


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_top_p_next_to_1_keeps_all_tokens(sampler: str) -> None:
    """Rounding may lose the last bit of the sum. A regression test: such requests ended their worker."""
    numbers = np.random.default_rng(0)
    for seed in range(8):
        logits = (numbers.standard_normal(20_011) * 3).astype(np.float32)
        next_to_1 = _draw(sampler, logits, [1], 1, Sampling(temperature=1.0, seed=seed, top_p=math.nextafter(1.0, 0.0)))
        assert next_to_1 == _draw(sampler, logits, [1], 1, Sampling(temperature=1.0, seed=seed))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_logprobs": 2}])
def test_nan_logits_do_not_crash(options: dict[str, float], sampler: str) -> None:
    """The worker of a broken model continues with other requests."""
    logits = np.full((1, VOCAB), np.nan, dtype=np.float32)
    token = _sampled(sampler, logits, [part_of([1], [], sampling=Sampling(**options))])[0]
    assert 0 <= token < VOCAB


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_fails_its_slice_alone(temperature: float, sampler: str) -> None:
    """One NaN in a row is enough. The tokens of the other slices do not change."""
    rows = np.random.default_rng(1).standard_normal((3, VOCAB)).astype(np.float32)
    parts = [part_of([token], [], sampling=Sampling(temperature=temperature, seed=token)) for token in (1, 2, 3)]
    expected = _sampled(sampler, rows.copy(), parts)
    rows[1, 7] = np.nan
    drawing, device = SAMPLERS[sampler]
    found = drawing.draw(torch.from_numpy(rows).to(device), parts)
    assert [failure for _, failure in found] == ["", NAN_SCORES, ""]
    assert [found[0][0][0][0], found[2][0][0][0]] == [expected[0], expected[2]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-60, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_temperature_too_small_for_float32_is_greedy(
    sampler: str, temperature: float, options: dict[str, float]
) -> None:
    """A regression test: one such request ended the worker."""
    logits = np.linspace(-9, 9, 1000, dtype=np.float32)
    assert _draw(sampler, logits, [1, 2], 2, Sampling(temperature=temperature, **options)) == 999


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_logprobs_are_of_the_raw_logits(sampler: str) -> None:
    """Before penalties, bias and temperature."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=0.0, logit_bias=((11, 50.0),), top_logprobs=3)
    drawing, device = SAMPLERS[sampler]
    (((token, logprob),), _), *_ = drawing.draw(logits.to(device), [part_of([4], [], sampling=sampling)])
    expected = logits[0].double().log_softmax(-1)
    assert token == 11
    assert logprob is not None
    assert logprob.logprob == pytest.approx(float(expected[11]), abs=1e-5)
    assert [top for top, _ in logprob.top] == expected.argsort(descending=True)[:3].tolist()
    np.testing.assert_allclose(
        [value for _, value in logprob.top], expected.sort(descending=True).values[:3], atol=1e-5
    )
