"""Draw tokens from logits. Random only in (seed, position): never in the batch, the worker or the step.

A row goes through: repetition penalty, presence and frequency penalties, logit bias, stop tokens masked before the
minimum length, what the grammar forbids masked, temperature, top_k, top_p (over what top_k kept), min_p. Log
probabilities are of the raw logits, before all of that: what the model said, not what the client made of it.

Logits are an array of numpy, or a tensor of torch where they lie on a GPU. What is called here has one name in both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from baton.core.step import Slice
from baton.core.types import Sampling, TokenLogprob

NUCLEUS_GUESS_TOKENS = 512
"""top_p looks at so many of the likeliest tokens first; a whole vocabulary is sorted only if they do not suffice."""
Drawn = tuple[int, TokenLogprob | None]
"""A token, and its log probability if asked for."""
TEMPERATURE_MIN = 1e-30
"""What float32 can still divide a logit by. A client's smaller one would be 0 / 0, and end the worker."""
Numbers = Any
"""An array of numpy or a tensor of torch: neither library has a type for both."""


def sample(logits: Numbers, slices: Sequence[Slice]) -> list[Drawn]:
    """Draw the next token of every slice, none of which has drafts. logits: [slices, vocab], float32; not changed."""
    return [drawn[0] for drawn in sample_drafted(logits, slices)]


def sample_drafted(logits: Numbers, slices: Sequence[Slice]) -> list[list[Drawn]]:
    """Draw the next tokens of every slice: one, and one more for each draft that comes true.

    logits: [rows, vocab], float32; those of `drawn_rows` of each slice, in order. Left as they are. What is drawn at a
    position depends on the tokens before it, the seed and the position only: a right draft changes no text.
    Source: speculative decoding (Leviathan et al., ICML 2023), in the special case of a draft without probabilities.
    """
    likeliest: list[int] = logits.argmax(-1).tolist()  # the lowest id among equals
    drawn: list[list[Drawn]] = []
    row = 0
    with _broken_models_allowed():
        for part in slices:
            drawn.append(_drawn_of(part, logits[row : row + 1 + part.drafts], likeliest[row : row + 1 + part.drafts]))
            row += 1 + part.drafts
    return drawn


def drawn_rows(part: Slice, first: int) -> range:
    """Return the rows of a step's hidden states that predict what a slice asks for. `first`: the slice's first row."""
    end = first + part.count
    return range(end - 1 - part.drafts, end)


def _broken_models_allowed() -> np.errstate:
    """Let numpy compute with infinities and with what is not a number, as torch does."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def _drawn_of(part: Slice, logits: Numbers, likeliest: Sequence[int]) -> list[Drawn]:
    """Draw for one slice. logits: [1 + drafts, vocab]."""
    drawn: list[Drawn] = []
    for draft in range(part.drafts + 1):
        view = part.at(draft)
        token = likeliest[draft] if _is_plain_greedy(view) else _draw(logits[draft], view)
        count = part.sampling.top_logprobs
        drawn.append((token, None if count is None else token_logprob(logits[draft], token, count)))
        if draft == part.drafts or part.tokens[view.start + view.count] != token:
            break
    return drawn


def token_logprob(logits: Numbers, token: int, count: int) -> TokenLogprob:
    """Return a token's log probability, and the `count` likeliest. logits: [vocab], raw."""
    lib = _library(logits)
    with _broken_models_allowed():
        above = logits - logits.max()
        logprobs = above - lib.log(lib.exp(above).sum())
        values, ids = largest(logprobs, count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token=token, logprob=float(logprobs[token]), top=top)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) for this seed and position: a counter-based generator, so it has no state to move."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8, person=b"baton-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def largest(scores: Numbers, count: int) -> tuple[Numbers, Numbers]:
    """Return the `count` largest of [vocab] and their ids, descending, the lower id first among equals."""
    lib, count = _library(scores), min(count, len(scores))
    if count == 0:
        return scores[:0], lib.argsort(scores[:0])
    (ids,) = lib.where(scores >= _least_of_largest(scores, count))  # ascending
    if len(ids) < count:  # not a number somewhere: a broken model shall say nonsense, and not end its worker
        (ids,) = lib.where(lib.ones_like(scores))
    order = lib.argsort(-scores[ids], stable=True)[:count]
    return scores[ids][order], ids[order]


def _library(numbers: Numbers) -> Any:  # noqa: ANN401
    """Return the module that computes with these numbers. Who holds a tensor has imported torch, and nobody else."""
    return np if isinstance(numbers, np.ndarray) else sys.modules["torch"]


def _least_of_largest(scores: Numbers, count: int) -> Numbers:
    """Return the smallest of the `count` largest. Libraries leave open which of several equals are among these."""
    if isinstance(scores, np.ndarray):
        at = len(scores) - count
        return np.partition(scores, at)[at]
    return scores.topk(count).values[-1]


def _is_plain_greedy(part: Slice) -> bool:
    return part.sampling.temperature == 0.0 and not _adjusts(part)


def _adjusts(part: Slice) -> bool:
    """Tell whether anything changes this row's logits before the draw."""
    sampling = part.sampling
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or bool(sampling.logit_bias)
        or _masks_stop_tokens(part)
        or part.allowed is not None
    )


def _masks_stop_tokens(part: Slice) -> bool:
    output_tokens = part.start + part.count - part.prompt_tokens
    return output_tokens < part.sampling.output_tokens_min and bool(part.sampling.stop_token_ids)


def _draw(logits: Numbers, part: Slice) -> int:
    scores = _adjusted(logits, part) if _adjusts(part) else logits
    sampling, lib = part.sampling, _library(logits)
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    scaled = (scores - scores.max()) / max(sampling.temperature, TEMPERATURE_MIN)
    point = uniform(sampling.seed, part.start + part.count)
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        weights = lib.exp(scaled)
        if sampling.min_p > 0.0:
            weights = weights * (weights >= sampling.min_p)  # the likeliest token weighs 1
        return _invert(weights, point)
    values, ids = _kept(scaled, sampling)
    return int(ids[_invert(lib.exp(values), point)])


def _adjusted(logits: Numbers, part: Slice) -> Numbers:
    """Apply penalties, bias and the minimum length to a copy of [vocab]."""
    sampling, lib = part.sampling, _library(logits)
    scores = lib.asarray(logits, copy=True)
    tokens = lib.asarray(list(part.tokens[: part.start + part.count]), device=logits.device)
    if sampling.repetition_penalty != 1.0:
        seen = lib.unique(tokens)
        old = scores[seen]
        scores[seen] = lib.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        written, counts = lib.unique(tokens[part.prompt_tokens :], return_counts=True)
        scores[written] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias:
        if token < len(scores):
            scores[token] += bias
    if _masks_stop_tokens(part):
        scores[[token for token in sampling.stop_token_ids if token < len(scores)]] = float("-inf")
    return scores if part.allowed is None else _constrained(scores, logits, part.allowed.rows()[0])


def _constrained(scores: Numbers, logits: Numbers, row: bytes) -> Numbers:
    """Mask what the grammar forbids. Where the minimum length then leaves nothing (the text is complete), it yields."""
    bits = np.unpackbits(np.frombuffer(row, dtype=np.uint8), bitorder="little", count=len(scores))
    forbidden = _library(scores).asarray(bits == 0, device=scores.device)
    masked = _without(scores, forbidden)
    return masked if bool(masked.max() > float("-inf")) else _without(logits, forbidden)


def _without(scores: Numbers, forbidden: Numbers) -> Numbers:
    masked = _library(scores).asarray(scores, copy=True)
    masked[forbidden] = float("-inf")
    return masked


def _kept(scaled: Numbers, sampling: Sampling) -> tuple[Numbers, Numbers]:
    """Return the scores that top_k, top_p and min_p leave, and their ids, likeliest first. scaled: [vocab], max 0."""
    if sampling.top_k > 0:
        values, ids = largest(scaled, sampling.top_k)
        mass = _weights(values).sum()
    else:
        mass = _weights(scaled).sum()
        values, ids = largest(scaled, NUCLEUS_GUESS_TOKENS)
        if bool(_weights(values).sum() < sampling.top_p * mass):
            values, ids = largest(scaled, len(scaled))
    weights = _weights(values)
    before = weights.cumsum(0) - weights  # what stands above a token; it stays if that alone does not reach top_p
    keep = before < sampling.top_p * mass
    keep[0] = True
    if sampling.min_p > 0.0:
        keep &= weights >= sampling.min_p
    return values[keep], ids[keep]


def _weights(scaled: Numbers) -> Numbers:
    """Return what tokens weigh against the likeliest, in float64: sums of a whole vocabulary need it."""
    lib = _library(scaled)
    return lib.exp(lib.asarray(scaled, dtype=lib.float64))


def _invert(weights: Numbers, point: float) -> int:
    """Find the index at which the cumulated weights pass `point` (0..1) of their sum. Weightless ones are never hit."""
    lib = _library(weights)
    sums = lib.cumsum(weights, 0, dtype=lib.float64)
    index = int(lib.searchsorted(sums, point * sums[-1], side="right"))
    return index if index < len(sums) else int(lib.where(weights)[0][-1])
