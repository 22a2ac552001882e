"""Guess what a request says next from what it has said and read: prompt lookup, by the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence


class PromptLookup:
    """Remembers what followed every short run of tokens of one request.

    Good where an answer repeats its prompt or itself: edits, quotations, tables, code. It costs a dictionary entry per
    token and run length, and nothing where nothing repeats.
    Source: prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self, *, ngram_min: int, ngram_max: int) -> None:
        """A guess needs the last `ngram_min` tokens to stand somewhere before; up to `ngram_max` are compared."""
        self._sizes = range(ngram_max, ngram_min - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        """Run of tokens to the index of the token that followed it last."""
        self._known = 0
        """Tokens whose runs are remembered."""

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that may follow. `tokens`: what the last call had, and what came since."""
        self._learn(tokens)
        for size in self._sizes:
            start = self._next.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if start is not None:
                return _copied(tokens, start, count)
        return []

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
