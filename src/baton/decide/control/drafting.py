"""Speculative decoding by prompt lookup: drafts of a request's next tokens, from its own text.

A draft is what followed the newest tokens at an earlier place. Its chance to be accepted is learned per request.
Source: prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

from baton.core.config import SpeculationConfig

_INDEXED_TOKENS_MAX = 1024
"""Tokens that one call of `guess` indexes at most, so that a long prompt does not delay a step."""
_PLACES_MAX = 16
"""Earlier places of the newest tokens that are compared."""
_PRIOR_ACCEPTED, _PRIOR_TRIED = 1.0, 3.0
"""The first estimate of a request: one accepted token of three."""
_MEMORY = 0.95
"""Weight of the results before a draft, against those of the draft."""
GAIN_RATIO_MIN = 1.1
"""Smaller expected gains are within the errors of the chances and times."""
_MEMORY_UNUSED = 0.98
"""The same for a draft that was not worth its price: after many of them, one is tried again."""


class Drafter:
    """Drafts of one request, from its own text. Useful where an answer repeats its prompt or itself: edits, tables."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._tokens_max = config.tokens_max or 0
        self._run_min, self._run_max = config.ngram_min, config.ngram_max
        self._newest: dict[int, int] = {}
        """Maps each run of `_run_min` tokens to the index of the token that followed it last."""
        self._earlier = array("i", [0])
        """By such an index: the index of the token that followed the same run before. 0: none."""
        self._accepted = self._tried = 0.0
        """Drafted tokens that were accepted, and those that were compared. Old ones count less."""

    def guess(self, tokens: Sequence[int], most: int, stop_token_ids: Sequence[int]) -> list[int]:
        """Return up to `most` likely next tokens, none of which is a stop token.

        `tokens`: all tokens so far. They must begin with those of the last call.
        """
        self._index(tokens)
        start, count = self._place(tokens), min(most, self._tokens_max)
        if not start or count <= 0:
            return []
        guessed = _copied(tokens, start, count)
        end = next((index for index, token in enumerate(guessed) if token in stop_token_ids), count)
        return guessed[:end]

    def gains(self, count: int) -> list[float]:
        """Return the chance of each of `count` drafted tokens to be accepted, which needs all before it to be."""
        chance = (self._accepted + _PRIOR_ACCEPTED) / (self._tried + _PRIOR_TRIED)
        return [chance ** (place + 1) for place in range(count)]

    def note(self, drafted: int, accepted: int) -> None:
        """Record how many tokens of a draft were accepted. Those after the first rejected one were not compared."""
        self._forget(_MEMORY)
        self._accepted += accepted
        self._tried += min(drafted, accepted + 1)

    def skip(self) -> None:
        """Record that a guess was not worth its time."""
        self._forget(_MEMORY_UNUSED)

    def _forget(self, memory: float) -> None:
        self._accepted *= memory
        self._tried *= memory

    def _index(self, tokens: Sequence[int]) -> None:
        size, earlier = self._run_min, self._earlier
        for index in range(len(earlier), min(len(tokens), len(earlier) + _INDEXED_TOKENS_MAX)):
            if index < size:
                earlier.append(0)
                continue
            run = _packed(tokens[index - size : index])
            earlier.append(self._newest.get(run, 0))
            self._newest[run] = index

    def _place(self, tokens: Sequence[int]) -> int:
        """Return the index of the token after the newest of the longest runs that equal the newest tokens. 0: none."""
        size, most = self._run_min, self._run_max
        if len(tokens) < size:
            return 0
        place, best, best_length = self._newest.get(_packed(tokens[-size:]), 0), 0, 0
        for _ in range(_PLACES_MAX):
            if not place or best_length == most:
                break
            length, longest = size, min(most, place)
            while length < longest and tokens[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return best


def worth_count(tokens: int, gains: Sequence[float], times_s: Sequence[float]) -> int:
    """Return the number of drafted tokens with the most expected output tokens per second.

    `tokens`: those of the step without drafts. `gains`: the chance of each drafted token, falling. `times_s`: the
    predicted time of the step with 0, 1, ... drafted tokens.
    """
    totals = accumulate(gains[: len(times_s) - 1], initial=float(tokens))
    rates = [total / time_s for total, time_s in zip(totals, times_s, strict=False)]
    best = max(range(len(rates)), key=rates.__getitem__)
    return best if rates[best] >= GAIN_RATIO_MIN * rates[0] else 0


def _packed(run: Sequence[int]) -> int:
    """Return one integer for a run of tokens: smaller than a tuple, and as unique."""
    packed = 0
    for token in run:
        packed = packed << 32 | token
    return packed


def _copied(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on. Past the end, the copied tokens repeat."""
    period = len(tokens) - start
    return [tokens[start + offset % period] for offset in range(count)]
