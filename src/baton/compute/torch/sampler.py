"""Sample on a device: all rows of a step together, with one upload of options and one copy of results to the host.

The tokens are those of `baton.compute.sampler`, whose order of operations applies. Only a draw within a rounding error
(1e-7) of the edge between two tokens may differ, because exponentials differ in their last bit between libraries.
Weights are added as integers, so a sum does not depend on its order, on the batch or on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from baton.compute.sampler import (
    NAN_SCORES,
    TEMPERATURE_MIN,
    Drawn,
    has_adjustments,
    masks_stop_tokens,
    uniform,
)
from baton.core.step import Slice
from baton.core.types import TokenLogprob

UNIT = float(1 << 44)
"""The integer weight of the most likely token. A sum over up to 2**19 tokens fits into an int64."""
NUCLEUS_TOKENS = 1024
"""Tokens in which top_p looks for its edge first. A row with a wider nucleus is drawn again, over the vocabulary."""
_RUN = 64
"""Length of the runs that a row is divided into. A search looks at whole runs first, then into one of them."""
_ID_BITS = 32
_ONE_BITS = 0x3F800000
"""The bits of 1.0, the largest weight, in float32."""
T = TypeVar("T")
Masks = Sequence[bytes | None]
"""For each row the tokens that its grammar allows, one bit per token id. None: it has no mask."""


class _Options(NamedTuple, Generic[T]):
    """The options of a row as floats, or of all rows as tensors [rows, 1] in float64. Flags are 0 and 1."""

    temperature: T
    repetition: T
    presence: T
    frequency: T
    top_p: T
    min_p: T
    floor: T
    """min_p of a row that is drawn from the whole vocabulary, else 0."""
    has_top_k: T
    limit: T
    """Maximum number of candidates: top_k, or the vocabulary."""
    is_limited: T
    """The row has top_k or top_p."""
    greedy: T
    point: T
    """The place of the draw in the sum of weights, in [0, 1)."""


def _options(view: Slice, vocab: int) -> _Options[float]:
    sampling = view.sampling
    is_limited = sampling.top_k > 0 or sampling.top_p < 1.0
    greedy = sampling.temperature == 0.0
    return _Options(
        temperature=1.0 if greedy else max(sampling.temperature, TEMPERATURE_MIN),
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        floor=0.0 if is_limited else sampling.min_p,
        has_top_k=sampling.top_k > 0,
        limit=min(sampling.top_k, vocab) or vocab,
        is_limited=is_limited,
        greedy=greedy,
        point=0.0 if greedy else uniform(sampling.seed, view.start + view.count),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of all rows of a step, made on the host."""

    sizes: tuple[int, ...]
    """Lengths of the parts of `packed`; see `_pack`."""
    packed: np.ndarray  # [sum of sizes] int64
    candidates: int
    """Candidates that rows with top_k or top_p are drawn from. 0: no row has either."""
    draws: bool
    """Whether a row has another token than the one with the largest logit."""
    logprobs: int | None
    """The largest number of likely tokens whose log probabilities a row returns. None: no row returns any."""

    @property
    def columns(self) -> int:
        """The numbers that a row returns: token, NaN, incomplete, log probability, likely ids, their values."""
        return 3 if self.logprobs is None else 4 + 2 * self.logprobs


def plan_rows(views: Sequence[Slice], masks: Masks, vocab: int, nucleus_tokens: int) -> Plan:
    """Return the plan of rows without drafts. nucleus_tokens: the width in which top_p looks for its edge."""
    rows = [_options(view, vocab) for view in views]
    counts = [view.sampling.top_logprobs for view in views if view.sampling.top_logprobs is not None]
    parts = _pack(rows, views, masks, vocab)
    limited = [int(row.limit) if row.has_top_k else nucleus_tokens for row in rows if row.is_limited and not row.greedy]
    return Plan(
        sizes=tuple(len(part) for part in parts),
        packed=np.concatenate(parts),
        candidates=min(vocab, max(limited, default=0)),
        draws=any(not row.greedy or has_adjustments(view) for row, view in zip(rows, views, strict=True)),
        logprobs=min(vocab, max(counts)) if counts else None,
    )


def _pack(rows: Sequence[_Options[float]], views: Sequence[Slice], masks: Masks, vocab: int) -> list[np.ndarray]:
    """Return the arrays of a plan, as int64. An index is row * vocab + token.

    They are: the options [fields of _Options, rows] as float64; indices of tokens of rows with a repetition penalty;
    of output tokens of rows with another penalty; of biased tokens; their biases as float64; of forbidden tokens; rows
    with a mask; their masks.
    """
    seen: list[np.ndarray] = []
    output: list[np.ndarray] = []
    biased: list[int] = []
    biases: list[float] = []
    forbidden: list[int] = []
    for index, (row, view) in enumerate(zip(rows, views, strict=True)):
        if not has_adjustments(view):
            continue
        first, end = index * vocab, view.start + view.count
        if row.repetition != 1.0:
            seen.append(np.array(view.tokens[:end], dtype=np.int64) + first)
        if row.presence != 0.0 or row.frequency != 0.0:
            output.append(np.array(view.tokens[view.prompt_tokens : end], dtype=np.int64) + first)
        known = [(token, bias) for token, bias in view.sampling.logit_bias if token < vocab]
        biased += [first + token for token, _ in known]
        biases += [bias for _, bias in known]
        stops = view.sampling.stop_token_ids if masks_stop_tokens(view) else ()
        forbidden += [first + token for token in (*view.bad_tokens(), *stops) if token < vocab]
    masked = [index for index, mask in enumerate(masks) if mask is not None]
    bits = np.zeros((len(masked), _mask_bytes(vocab)), dtype=np.uint8)
    for place, index in enumerate(masked):
        mask = np.frombuffer(masks[index] or b"", dtype=np.uint8)[: bits.shape[1]]
        bits[place, : len(mask)] = mask
    options = np.array(rows, dtype=np.float64).T.reshape(-1)
    lists = [
        _joined(seen),
        _joined(output),
        _int64(biased),
        np.array(biases, dtype=np.float64).view(np.int64),
        _int64(forbidden),
    ]
    return [options.copy().view(np.int64), *lists, _int64(masked), bits.reshape(-1).view(np.int64)]


def _mask_bytes(vocab: int) -> int:
    """Return the bytes of a mask, a multiple of 8."""
    return -(-vocab // 64) * 8


def _int64(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else _int64(())


class DeviceSampler:
    """Implements `Sampler` with torch, for logits on any device."""

    def __init__(self, nucleus_tokens: int = NUCLEUS_TOKENS) -> None:
        """nucleus_tokens: tests pass a small number, so that rows are drawn again over the vocabulary."""
        self._nucleus_tokens = nucleus_tokens

    def draw(self, logits: Tensor, slices: Sequence[Slice]) -> list[tuple[list[Drawn], str]]:
        views = [part.at(draft) for part in slices for draft in range(part.drafts + 1)]
        masks = [next(iter(view.allowed.rows()), None) if view.allowed is not None else None for view in views]
        rows = self._draw_rows(logits, views, masks, self._nucleus_tokens)
        starts = accumulate((1 + part.drafts for part in slices[:-1]), initial=0)
        results: list[tuple[list[Drawn], str]] = []
        for part, start in zip(slices, starts, strict=True):
            is_late = part.allowed is not None and masks[start] is None
            count = 0 if is_late else _accepted(part, [row[0] for row in rows[start : start + 1 + part.drafts]])
            found = rows[start : start + count]
            failure = NAN_SCORES if any(row[1] for row in found) else ""
            drawn = [_drawn(row, view.sampling.top_logprobs) for row, view in zip(found, views[start:], strict=False)]
            results.append((drawn, failure))
        return results

    def logprobs(self, logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
        chosen, count = _uploaded(_int64(tokens), logits.device)[:, None], min(count, logits.shape[1])
        found: list[list[float]] = torch.cat(_logprobs(logits, chosen, count), 1).tolist()
        return [_logprob(token, row, count) for token, row in zip(tokens, found, strict=True)]

    def _draw_rows(
        self, logits: Tensor, views: Sequence[Slice], masks: Masks, nucleus_tokens: int
    ) -> list[list[float]]:
        """Return the columns of each row; see `Plan`."""
        plan = plan_rows(views, masks, logits.shape[1], nucleus_tokens)
        found: list[list[float]] = compute_rows(logits, plan, _uploaded(plan.packed, logits.device)).tolist()
        again = [index for index, row in enumerate(found) if row[2]]
        if again and nucleus_tokens < logits.shape[1]:  # rows of NaN never find an edge
            wide = [views[index] for index in again], [masks[index] for index in again]
            for index, row in zip(again, self._draw_rows(logits[again], *wide, logits.shape[1]), strict=True):
                found[index] = row
        return found


def _accepted(part: Slice, tokens: Sequence[float]) -> int:
    """Return the number of drawn tokens that count: up to the first that differs from its draft."""
    draft = part.start + part.count - part.drafts
    for count, token in enumerate(tokens[:-1], start=1):
        if part.tokens[draft + count - 1] != token:
            return count
    return len(tokens)


def _drawn(row: Sequence[float], count: int | None) -> Drawn:
    token = int(row[0])
    return token, None if count is None else _logprob(token, row[3:], count)


def _logprob(token: int, numbers: Sequence[float], count: int) -> TokenLogprob:
    """Unpack the log probability of a token. numbers: its own, then ids, then as many values of likely tokens."""
    half = len(numbers) // 2
    ids, values = numbers[1 : 1 + half], numbers[1 + half :]
    top = tuple((int(one), value) for one, value in zip(ids[:count], values[:count], strict=True))
    return TokenLogprob(token=token, logprob=numbers[0], top=top)


def _uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device. On a GPU, through page-locked memory and without waiting for it."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def compute_rows(logits: Tensor, plan: Plan, packed: Tensor) -> Tensor:
    """Return the columns of each row: [rows, plan.columns] float64. Launches kernels, and waits for none.

    logits: [rows, vocab] float32, not changed. packed: `plan.packed` on the device of the logits.
    """
    tokens = likeliest = logits.argmax(-1, keepdim=True)  # [rows, 1]
    incomplete = torch.zeros_like(tokens)
    if plan.draws:
        options, *lists = packed.split(plan.sizes)
        columns = _Options(*options.view(torch.float64).view(-1, len(logits), 1))
        scores = _adjusted(logits, columns, lists)
        drawn, incomplete = _drawn_tokens(scores, columns, plan.candidates)
        tokens = torch.where(columns.greedy > 0, scores.argmax(-1, keepdim=True), drawn)
    found = [tokens.double(), logits.gather(1, likeliest).isnan().double(), incomplete.double()]
    return torch.cat(found if plan.logprobs is None else [*found, *_logprobs(logits, tokens, plan.logprobs)], 1)


def _adjusted(logits: Tensor, options: _Options[Tensor], lists: Sequence[Tensor]) -> Tensor:
    """Return the logits with penalties, bias and masks applied. lists: those of `_pack`. Indices may repeat."""
    seen, output, biased, biases, forbidden, masked, bits = lists
    if not sum(map(len, lists)):
        return logits
    vocab, scores = logits.shape[1], logits.clone(memory_format=torch.contiguous_format)
    flat = scores.view(-1)  # [rows * vocab]
    if len(seen):
        old, penalty = flat.gather(0, seen), options.repetition.view(-1).gather(0, seen // vocab).float()
        flat.index_copy_(0, seen, torch.where(old > 0, old / penalty, old * penalty))
    if len(output):
        counts = torch.zeros_like(flat, dtype=torch.int32)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        presence, frequency = (
            each.view(-1).gather(0, output // vocab) for each in (options.presence, options.frequency)
        )
        lower = flat.gather(0, output) - (presence + frequency * counts.gather(0, output))
        flat.index_copy_(0, output, lower.float())
    flat.index_add_(0, biased, biases.view(torch.float64).float())
    flat.index_fill_(0, forbidden, float("-inf"))
    if len(masked):
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        ones = bits.view(torch.uint8).view(len(masked), -1, 1) >> places & 1
        allowed = ones.flatten(1)[:, :vocab] > 0
        limited, raw = (each.index_select(0, masked).masked_fill_(~allowed, float("-inf")) for each in (scores, logits))
        # The grammar wins if it and the minimum length leave no token.
        is_empty = limited.amax(-1, keepdim=True) == float("-inf")
        scores.index_copy_(0, masked, torch.where(is_empty, raw, limited))
    return scores


def _drawn_tokens(scores: Tensor, options: _Options[Tensor], candidates: int) -> tuple[Tensor, Tensor]:
    """Draw a token of each row [rows, vocab]. Return the tokens, and whether top_p needs more candidates: [rows, 1]."""
    # Without abs, -0.0 - 0.0 is -0.0, whose bits sort before those of 0.0.
    distances = (scores.amax(-1, keepdim=True) - scores).abs_().div_(options.temperature.float())
    weights = (-distances).exp_()  # the largest is 1
    units = (weights * UNIT).long()
    tokens = _index_at(units * (weights >= options.floor.float()), options.point)
    if not candidates:
        return tokens, torch.zeros_like(tokens)
    has_top_k = options.has_top_k > 0
    # Ascending keys have descending scores (top_k) or weights (top_p), then ascending ids.
    keys = torch.where(has_top_k, distances.view(torch.int32), _ONE_BITS - weights.view(torch.int32))
    ids = _first_ids(keys, candidates)  # [rows, candidates]
    place = torch.arange(candidates, device=scores.device)
    limited = units.gather(1, ids) * (place < options.limit)
    ends = limited.cumsum(-1)
    total = torch.where(has_top_k, ends[:, -1:], units.sum(-1, keepdim=True))
    edge = options.top_p * total
    incomplete = ~has_top_k & (options.is_limited > 0) & (options.greedy == 0) & (ends[:, -1:] < edge)
    kept = limited * ((ends - limited < edge) & (weights.gather(1, ids) >= options.min_p.float()))
    order = torch.where(has_top_k, place, ids).argsort(-1)  # top_k draws by score, top_p alone by id
    chosen = _index_at(kept.gather(1, order), options.point)
    drawn = ids.gather(1, order.gather(1, chosen))
    return torch.where(options.is_limited > 0, drawn, tokens), incomplete


def _first_ids(keys: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` lowest keys [rows, vocab] int32, ascending; of equal keys the lower id first."""
    ids = torch.arange(keys.shape[1], device=keys.device)
    unique = (keys.long() << _ID_BITS) | ids
    return unique.topk(count, largest=False).values & ((1 << _ID_BITS) - 1)


def _index_at(units: Tensor, point: Tensor) -> Tensor:
    """Return where the cumulative units [rows, count] int64 pass `point` (0..1) of their sum: [rows, 1]."""
    count = units.shape[1]
    runs = functional.pad(units, (0, -count % _RUN)).view(len(units), -1, _RUN)
    ends = runs.sum(-1).cumsum(-1)  # [rows, runs]
    total = ends[:, -1:]
    target = torch.minimum((point * total).long(), total - 1)  # rounding must not move the point past the last token
    run = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    inner = runs.gather(1, run[..., None].expand(-1, -1, _RUN))[:, 0].cumsum(-1)  # [rows, _RUN]
    before = ends.gather(1, run) - inner[:, -1:]
    index = torch.searchsorted(inner, target - before, right=True)
    return (run * _RUN + index).clamp_(max=count - 1)


def _logprobs(logits: Tensor, tokens: Tensor, count: int) -> list[Tensor]:
    """Return in float64: log probabilities of tokens [rows, 1], ids [rows, count] of the likeliest, their values."""
    above = logits - logits.amax(-1, keepdim=True)
    total = above.exp().sum(-1, keepdim=True).log()
    logprobs = above - total
    ids = _first_ids((total - above).view(torch.int32), count)
    return [logprobs.gather(1, tokens).double(), ids.double(), logprobs.gather(1, ids).double()]
