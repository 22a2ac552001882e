"""Draft tokens for speculative decoding by prompt lookup: find the last tokens earlier in the request's own text."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.config import SpeculationConfig


class Drafter:
    """Drafts for one request: the tokens that followed the previous occurrence of its newest tokens.

    Useful if an answer repeats its prompt or itself: edits, quotations, tables, code. The price is a dictionary entry
    per token and run length, and a longer step if a draft is wrong. So drafts are shorter after a wrong one.
    Source: prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._sizes = range(config.ngram_max, config.ngram_min - 1, -1)
        self._tokens_max = config.tokens_max
        self._length = config.tokens_max
        """Current maximum draft length."""
        self._next: dict[tuple[int, ...], int] = {}
        """Maps a run of tokens to the index of the token that followed it last."""
        self._known = 0
        """Number of tokens that are indexed."""

    def guess(self, tokens: Sequence[int], most: int, stop_token_ids: Sequence[int]) -> list[int]:
        """Return up to `most` likely next tokens, none of which is a stop token.

        `tokens`: all tokens so far. They must begin with those of the last call.
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
        """Record the result of a draft, which sets the length of the next one."""
        if drafted:
            self._length = self._tokens_max if accepted == drafted else min(accepted + 1, self._tokens_max)

    def _learn(self, tokens: Sequence[int]) -> None:
        for index in range(max(1, self._known), len(tokens)):
            for size in self._sizes:
                if index >= size:
                    self._next[tuple(tokens[index - size : index])] = index
        self._known = len(tokens)


def _copied(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on. Past the end, the copied tokens repeat."""
    period = len(tokens) - start
    return [tokens[start + offset % period] for offset in range(count)]
