"""Sample tokens from logits. A random draw depends on (seed, position) only, not on the batch, the worker or the step.

The order of operations on a row is: repetition penalty, presence and frequency penalties, logit bias, mask of bad
words, mask of stop tokens before the minimum length, mask of the grammar, temperature, top_k, top_p (of the tokens left
by top_k), min_p.
Log probabilities are those of the raw logits, before all of these.

Logits are numpy arrays here, of one row at a time; `baton.compute.torch.sampler` draws all rows on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Protocol

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


class Sampler(Protocol):
    """Draws the tokens of a step."""

    def draw(self, logits: Any, slices: Sequence[Slice]) -> list[tuple[list[Drawn], str]]:  # noqa: ANN401
        """Return for each slice its next tokens, and the reason why it fails (empty: it does not).

        logits: [rows, vocab] float32, the `drawn_rows` of each slice in order; not changed.
        No token: the grammar's mask is late.
        """
        ...

    def logprobs(self, logits: Any, tokens: Sequence[int], count: int) -> list[TokenLogprob]:  # noqa: ANN401
        """Return for each row of logits [rows, vocab] the log probabilities of its token and of `count` likely ones."""
        ...


class HostSampler:
    """Implements `Sampler` with numpy, for logits in host memory: numpy arrays, or torch tensors."""

    def draw(self, logits: Any, slices: Sequence[Slice]) -> list[tuple[list[Drawn], str]]:  # noqa: ANN401
        rows = np.asarray(logits)
        likeliest = likeliest_tokens(rows)
        drawn = sample_drafted(rows, slices, likeliest)
        return list(zip(drawn, nan_failures(rows, slices, likeliest, drawn), strict=True))

    def logprobs(self, logits: Any, tokens: Sequence[int], count: int) -> list[TokenLogprob]:  # noqa: ANN401
        return [token_logprob(row, token, count) for row, token in zip(np.asarray(logits), tokens, strict=True)]


def sample(logits: np.ndarray, slices: Sequence[Slice]) -> list[Drawn]:
    """Return the next token of every slice. No slice may have drafts or a late mask.

    logits: [slices, vocab]; not changed.
    """
    return [drawn[0] for drawn in sample_drafted(logits, slices)]


def likeliest_tokens(logits: np.ndarray) -> list[int]:
    """Return the token with the largest logit of each row: the lowest id among equals, one with NaN if there is any."""
    return logits.argmax(-1).tolist()


def sample_drafted(
    logits: np.ndarray, slices: Sequence[Slice], likeliest: Sequence[int] | None = None
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
    logits: np.ndarray, slices: Sequence[Slice], likeliest: Sequence[int], drawn: Sequence[Sequence[Drawn]]
) -> list[str]:
    """Return the reason why each slice fails: its tokens were drawn from NaN. Empty: it does not.

    logits, likeliest: as for `sample_drafted`, which has drawn the tokens. Rows of rejected drafts do not count.
    """
    is_nan = np.isnan(logits[range(len(likeliest)), list(likeliest)]).tolist()
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


def _sample_slice(part: Slice, logits: np.ndarray, likeliest: Sequence[int]) -> list[Drawn]:
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


def token_logprob(logits: np.ndarray, token: int, count: int) -> TokenLogprob:
    """Return a token's log probability, and those of the `count` most likely tokens. logits: [vocab], raw."""
    with _float_errors_ignored():
        above = logits - logits.max()
        logprobs = above - np.log(np.exp(above).sum())
        values, ids = largest(logprobs, count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token=token, logprob=float(logprobs[token]), top=top)


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) for this seed and position. The generator is counter-based and has no state."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8, person=b"baton-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def largest(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` largest scores of [vocab] and their ids, descending; of equal scores the lower id first."""
    count = min(count, len(scores))
    if count == 0:
        return scores[:0], np.argsort(scores[:0])
    (ids,) = np.where(scores >= _threshold(scores, count))  # ascending
    if len(ids) < count:  # NaN scores of a broken model must not end the worker
        (ids,) = np.where(np.ones_like(scores))
    order = np.argsort(-scores[ids], stable=True)[:count]
    return scores[ids][order], ids[order]


def _threshold(scores: np.ndarray, count: int) -> np.ndarray:
    """Return a threshold that at least `count` scores reach, and not many more."""
    if len(scores) >= 2 * _RUN * count:  # `count` of the runs' maxima reach it, so at least `count` scores do
        scores = scores[: len(scores) // _RUN * _RUN].reshape(-1, _RUN).max(1)
    at = len(scores) - count
    return np.partition(scores, at)[at]


def _is_plain_greedy(part: Slice) -> bool:
    return part.sampling.temperature == 0.0 and not has_adjustments(part)


def has_adjustments(part: Slice) -> bool:
    """Return whether the sampling options change this row's logits."""
    sampling = part.sampling
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or bool(sampling.logit_bias)
        or bool(sampling.bad_words)
        or masks_stop_tokens(part)
        or part.allowed is not None
    )


def masks_stop_tokens(part: Slice) -> bool:
    output_tokens = part.start + part.count - part.prompt_tokens
    return output_tokens < part.sampling.output_tokens_min and bool(part.sampling.stop_token_ids)


def _draw(logits: np.ndarray, part: Slice) -> int:
    scores = _adjusted_scores(logits, part) if has_adjustments(part) else logits
    sampling = part.sampling
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    scaled = (scores - scores.max()) / max(sampling.temperature, TEMPERATURE_MIN)
    if sampling.top_k > 0:
        values, ids = largest(scaled, sampling.top_k)
        weights = _filtered_weights(np.exp(values), sampling)
    else:
        ids, weights = None, _filtered_weights(np.exp(scaled), sampling)
    index = _index_at(weights, uniform(sampling.seed, part.start + part.count))
    return index if ids is None else int(ids[index])


def _adjusted_scores(logits: np.ndarray, part: Slice) -> np.ndarray:
    """Return a copy of logits [vocab] with penalties, bias and masks applied."""
    sampling = part.sampling
    scores = logits.copy()
    tokens = np.array(part.tokens[: part.start + part.count])
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(tokens)
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        output, counts = np.unique(tokens[part.prompt_tokens :], return_counts=True)
        scores[output] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias:
        if token < len(scores):
            scores[token] += bias
    for token in part.bad_tokens():
        if token < len(scores):
            scores[token] = float("-inf")
    if masks_stop_tokens(part):
        scores[[token for token in sampling.stop_token_ids if token < len(scores)]] = float("-inf")
    return scores if part.allowed is None else _constrained(scores, logits, part.allowed.rows()[0])


def _constrained(scores: np.ndarray, logits: np.ndarray, row: bytes) -> np.ndarray:
    """Mask the tokens that the grammar forbids. The grammar wins if it and the minimum length leave no token."""
    bits = np.unpackbits(np.frombuffer(row, dtype=np.uint8), bitorder="little", count=len(scores))
    forbidden = bits == 0
    masked = _masked(scores, forbidden)
    return masked if bool(masked.max() > float("-inf")) else _masked(logits, forbidden)


def _masked(scores: np.ndarray, forbidden: np.ndarray) -> np.ndarray:
    masked = scores.copy()
    masked[forbidden] = float("-inf")
    return masked


def _filtered_weights(weights: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the weights [count] with those removed by top_p and min_p set to 0. float32; the largest is 1."""
    if sampling.top_p < 1.0:
        weights = weights * _nucleus(weights, sampling.top_p)
    if sampling.min_p > 0.0:
        weights = weights * (weights >= sampling.min_p)
    return weights


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Return which weights [count] are in the smallest set of largest weights with a sum of `top_p` of the total.

    Of equal weights the lower id comes first. Weights are added to buckets by their leading bits, and only the bucket
    at the edge is sorted.
    """
    if not bool(weights.sum() < float("inf")):  # NaN weights of a broken model: see `largest`
        return np.ones_like(weights)
    keys = weights.view(np.int32) >> _BUCKET_BITS
    sums = np.bincount(keys, weights=weights.astype(np.float64))
    from_above = np.cumsum(sums[::-1])[::-1]
    target = top_p * from_above[0]  # from the same sum, because a sum in another order may be less than the target
    edge = int(np.where(from_above >= target)[0][-1])
    (at_edge,) = np.where(keys == edge)
    at_edge = at_edge[np.argsort(-weights[at_edge], stable=True)]
    inside = weights[at_edge].astype(np.float64)
    above = from_above[edge] - sums[edge] + np.cumsum(inside, 0) - inside  # of each: the sum of all larger weights
    kept = keys > edge
    kept[at_edge[above < target]] = True
    kept[weights.argmax()] = True
    return kept


def _index_at(weights: np.ndarray, point: float) -> int:
    """Return the index where the cumulative weights pass `point` (0..1) of their sum. It never has weight 0."""
    whole = len(weights) // _RUN * _RUN
    runs = weights[:whole].reshape(-1, _RUN).sum(1, dtype=np.float64)
    ends = np.cumsum(np.concatenate((runs, weights[whole:].sum(dtype=np.float64)[None])), 0)
    target = point * ends[-1]
    run = int(np.searchsorted(ends, target, side="right"))
    if run < len(ends):
        before = ends[run - 1] if run else 0.0
        part = weights[run * _RUN : (run + 1) * _RUN]
        index = int(np.searchsorted(np.cumsum(part, 0, dtype=np.float64), target - before, side="right"))
        if index < len(part):
            return run * _RUN + index
        weights = weights[: (run + 1) * _RUN]  # rounding moved the point past this run: take its last weight
    (positive,) = np.where(weights)
    return int(positive[-1])
