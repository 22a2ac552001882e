"""Draw tokens from logits. Random only in (seed, position): never in the batch, the worker or the step.

A row goes through: repetition penalty, presence and frequency penalties, logit bias, stop tokens masked before the
minimum length, what the grammar forbids masked, temperature, top_k, top_p (over what top_k kept), min_p. Log
probabilities are of the raw logits, before all of that: what the model said, not what the client made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from baton.core.step import Slice
from baton.core.types import Sampling, TokenLogprob

NUCLEUS_GUESS_TOKENS = 512
"""top_p looks at so many of the likeliest tokens first; a whole vocabulary is sorted only if they do not suffice."""
Drawn = tuple[int, TokenLogprob | None]
"""A token, and its log probability if asked for."""
TEMPERATURE_MIN = 1e-30
"""What float32 can still divide a logit by. A client's smaller one would be 0 / 0, and end the worker."""


def sample(logits: Tensor, slices: Sequence[Slice]) -> list[Drawn]:
    """Draw the next token of every slice, none of which has drafts. logits: [slices, vocab], float32; not changed."""
    return [drawn[0] for drawn in sample_drafted(logits, slices)]


def sample_drafted(logits: Tensor, slices: Sequence[Slice]) -> list[list[Drawn]]:
    """Draw the next tokens of every slice: one, and one more for each draft that comes true.

    logits: [rows, vocab], float32; those of `drawn_rows` of each slice, in order. Left as they are. What is drawn at a
    position depends on the tokens before it, the seed and the position only: a right draft changes no text.
    Source: speculative decoding (Leviathan et al., ICML 2023), in the special case of a draft without probabilities.
    """
    likeliest = _likeliest(logits)
    drawn: list[list[Drawn]] = []
    row = 0
    for part in slices:
        drawn.append(_drawn_of(part, logits[row : row + 1 + part.drafts], likeliest[row : row + 1 + part.drafts]))
        row += 1 + part.drafts
    return drawn


def drawn_rows(part: Slice, first: int) -> range:
    """Return the rows of a step's hidden states that predict what a slice asks for. `first`: the slice's first row."""
    end = first + part.count
    return range(end - 1 - part.drafts, end)


def _drawn_of(part: Slice, logits: Tensor, likeliest: Sequence[int]) -> list[Drawn]:
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


def token_logprob(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """Return a token's log probability, and the `count` likeliest. logits: [vocab], raw."""
    logprobs = logits.log_softmax(-1)
    values, ids = largest(logprobs, count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token=token, logprob=float(logprobs[token]), top=top)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) for this seed and position: a counter-based generator, so it has no state to move."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8, person=b"baton-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of [vocab] and their ids, descending, the lower id first among equals.

    `torch.topk` alone leaves open which of several equals it returns.
    """
    count = min(count, len(scores))
    if count == 0:
        return scores[:0], torch.empty(0, dtype=torch.int64, device=scores.device)
    threshold = scores.topk(count).values[-1]
    ids = (scores >= threshold).nonzero().flatten()  # ascending
    if len(ids) < count:  # not a number somewhere: a broken model shall say nonsense, and not end its worker
        ids = torch.arange(len(scores), device=scores.device)
    values, order = scores[ids].sort(descending=True, stable=True)
    return values[:count], ids[order][:count]


def _likeliest(logits: Tensor) -> list[int]:
    """Return the largest of each row of [rows, vocab], the lowest id among equals. numpy takes a tenth of the time."""
    return (logits if logits.is_cuda else logits.numpy()).argmax(-1).tolist()


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


def _draw(logits: Tensor, part: Slice) -> int:
    scores = _adjusted(logits, part) if _adjusts(part) else logits
    sampling = part.sampling
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    scaled = (scores - scores.max()) / max(sampling.temperature, TEMPERATURE_MIN)
    point = uniform(sampling.seed, part.start + part.count)
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        weights = scaled.exp()
        if sampling.min_p > 0.0:
            weights = weights.masked_fill(weights < sampling.min_p, 0.0)  # the likeliest token weighs 1
        return _invert(weights, point)
    values, ids = _kept(scaled, sampling)
    return int(ids[_invert(values.exp(), point)])


def _adjusted(logits: Tensor, part: Slice) -> Tensor:
    """Apply penalties, bias and the minimum length to a copy of [vocab]."""
    sampling, scores = part.sampling, logits.clone()
    tokens = torch.tensor(list(part.tokens[: part.start + part.count]), device=logits.device)
    if sampling.repetition_penalty != 1.0:
        seen = tokens.unique()
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        written, counts = tokens[part.prompt_tokens :].unique(return_counts=True)
        scores[written] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias:
        if token < len(scores):
            scores[token] += bias
    if _masks_stop_tokens(part):
        scores[[token for token in sampling.stop_token_ids if token < len(scores)]] = float("-inf")
    return scores if part.allowed is None else _constrained(scores, logits, part.allowed.rows()[0])


def _constrained(scores: Tensor, logits: Tensor, row: bytes) -> Tensor:
    """Mask what the grammar forbids. Where the minimum length then leaves nothing (the text is complete), it yields."""
    bits = np.unpackbits(np.frombuffer(row, dtype=np.uint8), bitorder="little", count=len(scores))
    forbidden = torch.from_numpy(bits == 0).to(scores.device)
    masked = scores.masked_fill(forbidden, float("-inf"))
    return masked if bool(masked.max() > float("-inf")) else logits.masked_fill(forbidden, float("-inf"))


def _kept(scaled: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the scores that top_k, top_p and min_p leave, and their ids, likeliest first. scaled: [vocab], max 0."""
    if sampling.top_k > 0:
        values, ids = largest(scaled, sampling.top_k)
        mass = float(values.double().exp().sum())
    else:
        mass = float(scaled.double().exp().sum())
        values, ids = largest(scaled, NUCLEUS_GUESS_TOKENS)
        if float(values.double().exp().sum()) < sampling.top_p * mass:
            values, ids = scaled.sort(descending=True, stable=True)
    weights = values.double().exp()
    before = weights.cumsum(0) - weights  # what stands above a token; it stays if that alone does not reach top_p
    keep = before < sampling.top_p * mass
    keep[0] = True
    if sampling.min_p > 0.0:
        keep &= weights >= sampling.min_p
    return values[keep], ids[keep]


def _invert(weights: Tensor, point: float) -> int:
    """Find the index at which the cumulated weights pass `point` (0..1) of their sum. Weightless ones are never hit."""
    sums = weights.double().cumsum(0)
    target = torch.tensor(point * float(sums[-1]), dtype=torch.float64, device=sums.device)
    index = int(torch.searchsorted(sums, target, right=True))
    return index if index < len(sums) else int(weights.nonzero()[-1])
