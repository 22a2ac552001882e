"""Guess what a request says next from what it has said and read: prompt lookup, by the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.config import SpeculationConfig


class Drafter:
    """Guesses for one request: what followed the last time that its text read like this.

    Good where an answer repeats its prompt or itself: edits, quotations, tables, code. It costs a dictionary entry per
    token and run length, and a longer step where it was wrong; so after a wrong guess the next ones are shorter.
    Source: prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._sizes = range(config.ngram_max, config.ngram_min - 1, -1)
        self._tokens_max = config.tokens_max
        self._length = config.tokens_max
        """Guesses that are made at most, from the last success."""
        self._next: dict[tuple[int, ...], int] = {}
        """Run of tokens to the index of the token that followed it last."""
        self._known = 0
        """Tokens whose runs are remembered."""

    def guess(self, tokens: Sequence[int], most: int, stop_token_ids: Sequence[int]) -> list[int]:
        """Return up to `most` tokens that may follow, none of which ends the text.

        `tokens`: what the last call had, and what came since.
        """
        self._learn(tokens)
        count = min(most, self._length)
        start = next((found for size in self._sizes if (found := self._next.get(tuple(tokens[-size:])))), None)
        if start is None or count <= 0:
            return []
        guessed = _copied(tokens, start, count)
        end = next((index for index, token in enumerate(guessed) if token in stop_token_ids), count)
        return guessed[:end]

    def note(self, drafted: int, accepted: int) -> None:
        """Learn from a verified guess how long the next one may be."""
        if drafted:
            self._length = self._tokens_max if accepted == drafted else min(accepted + 1, self._tokens_max)

    def _learn(self, tokens: Sequence[int]) -> None:
        for index in range(max(1, self._known), len(tokens)):
            for size in self._sizes:
                if index >= size:
                    self._next[tuple(tokens[index - size : index])] = index
        self._known = len(tokens)


def _copied(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Copy from `start` on; past the end, what was copied goes on being copied (a repetition)."""
    period = len(tokens) - start
    return [tokens[start + offset % period] for offset in range(count)]
