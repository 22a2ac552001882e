"""Sample tokens from logits. A random draw depends on (seed, position) only, not on the batch, the worker or the step.

The order of operations on a row is: repetition penalty, presence and frequency penalties, logit bias, mask of bad
words, mask of stop tokens before the minimum length, mask of the grammar, temperature, top_k, top_p (of the tokens left
by top_k), min_p.
Log probabilities are those of the raw logits, before all of these.

Logits are a numpy array, or a torch tensor on a GPU. Functions called here have the same name in both libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np

from baton.core.step import Slice
from baton.core.types import Sampling, TokenLogprob

_RUN = 64
"""Length of the runs that a row is divided into. A search looks at whole runs first, then into one of them."""
_BUCKET_BITS = 19
"""Low bits of a float32 that are dropped to find a weight's bucket. Weights of one bucket differ by at most 1/16."""
Drawn = tuple[int, TokenLogprob | None]
"""A token, and its log probability if requested."""
TEMPERATURE_MIN = 1e-30
"""The smallest temperature that float32 can divide a logit by. A smaller one would give 0 / 0 and end the worker."""
NAN_SCORES = "the model computes NaN for this prompt; compute with --dtype float32, or download the model again"
"""Reason of a request that fails because its logits are not numbers."""
Numbers = Any
"""A numpy array or a torch tensor. There is no common type."""


def sample(logits: Numbers, slices: Sequence[Slice]) -> list[Drawn]:
    """Return the next token of every slice. No slice may have drafts or a late mask.

    logits: [slices, vocab]; not changed.
    """
    return [drawn[0] for drawn in sample_drafted(logits, slices)]


def likeliest_tokens(logits: Numbers) -> list[int]:
    """Return the token with the largest logit of each row: the lowest id among equals, one with NaN if there is any."""
    return logits.argmax(-1).tolist()


def sample_drafted(
    logits: Numbers, slices: Sequence[Slice], likeliest: Sequence[int] | None = None
) -> list[list[Drawn]]:
    """Sample the next tokens of every slice: one, and one more for each accepted draft.

    logits: [rows, vocab], float32, the `drawn_rows` of each slice in order; not changed. A token depends only on the
    tokens before it, the seed and the position, so drafts do not change the text.
    likeliest: the `likeliest_tokens` of the logits, if the caller has them.
    Source: speculative decoding (Leviathan et al., ICML 2023), in the special case of drafts without probabilities.
    """
    likeliest = likeliest_tokens(logits) if likeliest is None else likeliest
    drawn: list[list[Drawn]] = []
    row = 0
    with _float_errors_ignored():
        for part in slices:
            drawn.append(
                _sample_slice(part, logits[row : row + 1 + part.drafts], likeliest[row : row + 1 + part.drafts])
            )
            row += 1 + part.drafts
    return drawn


def nan_failures(
    logits: Numbers, slices: Sequence[Slice], likeliest: Sequence[int], drawn: Sequence[Sequence[Drawn]]
) -> list[str]:
    """Return the reason why each slice fails: its tokens were drawn from NaN. Empty: it does not.

    logits, likeliest: as for `sample_drafted`, which has drawn the tokens. Rows of rejected drafts do not count.
    """
    lib, rows = _library(logits), range(len(likeliest))
    is_nan = lib.isnan(logits[list(rows), list(likeliest)]).tolist()
    starts = accumulate((1 + part.drafts for part in slices[:-1]), initial=0)
    return [
        NAN_SCORES if any(is_nan[start : start + len(found)]) else ""
        for start, found in zip(starts, drawn, strict=True)
    ]


def drawn_rows(part: Slice, first: int) -> range:
    """Return the rows of a step's hidden states that predict the slice's next tokens. first: the slice's first row."""
    end = first + part.count
    return range(end - 1 - part.drafts, end)


def _float_errors_ignored() -> np.errstate:
    """Let numpy compute with infinities and NaN without warnings, as torch does."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def _sample_slice(part: Slice, logits: Numbers, likeliest: Sequence[int]) -> list[Drawn]:
    """Return the next tokens of one slice. Empty: its grammar's mask is late. logits: [1 + drafts, vocab]."""
    drawn: list[Drawn] = []
    if part.allowed is not None and not part.allowed.rows():
        return drawn
    for draft in range(part.drafts + 1):
        view = part.at(draft)
        token = likeliest[draft] if _is_plain_greedy(view) else _draw(logits[draft], view)
        count = part.sampling.top_logprobs
        drawn.append((token, None if count is None else token_logprob(logits[draft], token, count)))
        if draft == part.drafts or part.tokens[view.start + view.count] != token:
            break
    return drawn


def token_logprob(logits: Numbers, token: int, count: int) -> TokenLogprob:
    """Return a token's log probability, and those of the `count` most likely tokens. logits: [vocab], raw."""
    lib = _library(logits)
    with _float_errors_ignored():
        above = logits - logits.max()
        logprobs = above - lib.log(lib.exp(above).sum())
        values, ids = largest(logprobs, count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token=token, logprob=float(logprobs[token]), top=top)


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) for this seed and position. The generator is counter-based and has no state."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8, person=b"baton-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def largest(scores: Numbers, count: int) -> tuple[Numbers, Numbers]:
    """Return the `count` largest scores of [vocab] and their ids, descending; of equal scores the lower id first."""
    lib, count = _library(scores), min(count, len(scores))
    if count == 0:
        return scores[:0], lib.argsort(scores[:0])
    (ids,) = lib.where(scores >= _threshold(scores, count))  # ascending
    if len(ids) < count:  # NaN scores of a broken model must not end the worker
        (ids,) = lib.where(lib.ones_like(scores))
    order = lib.argsort(-scores[ids], stable=True)[:count]
    return scores[ids][order], ids[order]


def _library(numbers: Numbers) -> Any:  # noqa: ANN401
    """Return numpy or torch, whichever made these numbers. Only processes with a tensor have imported torch."""
    return np if isinstance(numbers, np.ndarray) else sys.modules["torch"]


def _threshold(scores: Numbers, count: int) -> Numbers:
    """Return a threshold that at least `count` scores reach, and not many more."""
    if not isinstance(scores, np.ndarray):
        return scores.topk(count).values[-1]
    if len(scores) >= 2 * _RUN * count:  # `count` of the runs' maxima reach it, so at least `count` scores do
        scores = scores[: len(scores) // _RUN * _RUN].reshape(-1, _RUN).max(1)
    at = len(scores) - count
    return np.partition(scores, at)[at]


def _is_plain_greedy(part: Slice) -> bool:
    return part.sampling.temperature == 0.0 and not _has_adjustments(part)


def _has_adjustments(part: Slice) -> bool:
    """Return whether the sampling options change this row's logits."""
    sampling = part.sampling
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or bool(sampling.logit_bias)
        or bool(sampling.bad_words)
        or _masks_stop_tokens(part)
        or part.allowed is not None
    )


def _masks_stop_tokens(part: Slice) -> bool:
    output_tokens = part.start + part.count - part.prompt_tokens
    return output_tokens < part.sampling.output_tokens_min and bool(part.sampling.stop_token_ids)


def _draw(logits: Numbers, part: Slice) -> int:
    scores = _adjusted_scores(logits, part) if _has_adjustments(part) else logits
    sampling, lib = part.sampling, _library(logits)
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    scaled = (scores - scores.max()) / max(sampling.temperature, TEMPERATURE_MIN)
    if sampling.top_k > 0:
        values, ids = largest(scaled, sampling.top_k)
        weights = _filtered_weights(lib.exp(values), sampling)
    else:
        ids, weights = None, _filtered_weights(lib.exp(scaled), sampling)
    index = _index_at(weights, uniform(sampling.seed, part.start + part.count))
    return index if ids is None else int(ids[index])


def _adjusted_scores(logits: Numbers, part: Slice) -> Numbers:
    """Return a copy of logits [vocab] with penalties, bias and masks applied."""
    sampling, lib = part.sampling, _library(logits)
    scores = lib.asarray(logits, copy=True)
    tokens = lib.asarray(list(part.tokens[: part.start + part.count]), device=logits.device)
    if sampling.repetition_penalty != 1.0:
        seen = lib.unique(tokens)
        old = scores[seen]
        scores[seen] = lib.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        output, counts = lib.unique(tokens[part.prompt_tokens :], return_counts=True)
        scores[output] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias:
        if token < len(scores):
            scores[token] += bias
    for token in part.bad_tokens():
        if token < len(scores):
            scores[token] = float("-inf")
    if _masks_stop_tokens(part):
        scores[[token for token in sampling.stop_token_ids if token < len(scores)]] = float("-inf")
    return scores if part.allowed is None else _constrained(scores, logits, part.allowed.rows()[0])


def _constrained(scores: Numbers, logits: Numbers, row: bytes) -> Numbers:
    """Mask the tokens that the grammar forbids. The grammar wins if it and the minimum length leave no token."""
    bits = np.unpackbits(np.frombuffer(row, dtype=np.uint8), bitorder="little", count=len(scores))
    forbidden = _library(scores).asarray(bits == 0, device=scores.device)
    masked = _masked(scores, forbidden)
    return masked if bool(masked.max() > float("-inf")) else _masked(logits, forbidden)


def _masked(scores: Numbers, forbidden: Numbers) -> Numbers:
    masked = _library(scores).asarray(scores, copy=True)
    masked[forbidden] = float("-inf")
    return masked


def _filtered_weights(weights: Numbers, sampling: Sampling) -> Numbers:
    """Return the weights [count] with those removed by top_p and min_p set to 0. float32; the largest is 1."""
    if sampling.top_p < 1.0:
        weights = weights * _nucleus(weights, sampling.top_p)
    if sampling.min_p > 0.0:
        weights = weights * (weights >= sampling.min_p)
    return weights


def _nucleus(weights: Numbers, top_p: float) -> Numbers:
    """Return which weights [count] are in the smallest set of largest weights with a sum of `top_p` of the total.

    Of equal weights the lower id comes first. Weights are added to buckets by their leading bits, and only the bucket
    at the edge is sorted.
    """
    lib = _library(weights)
    if not bool(weights.sum() < float("inf")):  # NaN weights of a broken model: see `largest`
        return lib.ones_like(weights)
    keys = weights.view(lib.int32) >> _BUCKET_BITS
    sums = lib.bincount(keys, weights=lib.asarray(weights, dtype=lib.float64))
    from_above = lib.flip(lib.cumsum(lib.flip(sums, (0,)), 0), (0,))
    target = top_p * from_above[0]  # from the same sum, because a sum in another order may be less than the target
    edge = int(lib.where(from_above >= target)[0][-1])
    (at_edge,) = lib.where(keys == edge)
    at_edge = at_edge[lib.argsort(-weights[at_edge], stable=True)]
    inside = lib.asarray(weights[at_edge], dtype=lib.float64)
    above = from_above[edge] - sums[edge] + lib.cumsum(inside, 0) - inside  # of each: the sum of all larger weights
    kept = keys > edge
    kept[at_edge[above < target]] = True
    kept[weights.argmax()] = True
    return kept


def _index_at(weights: Numbers, point: float) -> int:
    """Return the index where the cumulative weights pass `point` (0..1) of their sum. It never has weight 0."""
    lib = _library(weights)
    whole = len(weights) // _RUN * _RUN
    runs = weights[:whole].reshape(-1, _RUN).sum(1, dtype=lib.float64)
    ends = lib.cumsum(lib.concatenate((runs, weights[whole:].sum(dtype=lib.float64)[None])), 0)
    target = point * ends[-1]
    run = int(lib.searchsorted(ends, target, side="right"))
    if run < len(ends):
        before = ends[run - 1] if run else 0.0
        part = weights[run * _RUN : (run + 1) * _RUN]
        index = int(lib.searchsorted(lib.cumsum(part, 0, dtype=lib.float64), target - before, side="right"))
        if index < len(part):
            return run * _RUN + index
        weights = weights[: (run + 1) * _RUN]  # rounding moved the point past this run: take its last weight
    (positive,) = lib.where(weights)
    return int(positive[-1])
