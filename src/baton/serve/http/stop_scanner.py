"""Find stop strings in streamed text. Text that may be the beginning of a stop string is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Cuts a stream of text at the first complete stop string (the longest one if two end at the same character).

    The result does not depend on how the text was split into pieces. The time per character does not depend on the
    length of the stop strings.
    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", 1977.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        """`stops`: the stop strings, none of them empty. `keeps_stop`: the text ends with the one that it reached."""
        self._keeps_stop = keeps_stop
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.stopped = False
        """True once a stop string was found. The text after it is dropped, and the string itself unless it is kept."""
        self.found = ""
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Add a piece of text. Return the text that can be sent, as it certainly precedes any stop string."""
        if not self._matchers:
            return text
        if self.stopped or self._is_harmless(text):
            return "" if self.stopped else text
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            met = [matcher.length for matcher in self._matchers if matcher.step(character)]
            if met:
                self.stopped, self._held = True, ""
                self.found = whole[end - max(met) : end]
                return whole[: end if self._keeps_stop else end - max(met)]
        safe = len(whole) - max(matcher.matched for matcher in self._matchers)
        self._held = whole[safe:]
        return whole[:safe]

    def flush(self) -> str:
        """End the text. Return the text that was held back: it is not part of a stop string."""
        held, self._held = self._held, ""
        return held

    def _is_harmless(self, text: str) -> bool:
        """Return whether no text is held back and no stop string can begin in `text`. A fast path for most pieces."""
        return not self._held and not any(matcher.first in text for matcher in self._matchers)


class _Matcher:
    """Tracks how many first characters of a stop string the end of the text matches."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.first = stop[0]
        self.length = len(stop)
        self.matched = 0

    def step(self, character: str) -> bool:
        """Add one character. Return True if it completes the stop string; do not call it again after that."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self._stop[self.matched] == character:
            self.matched += 1
        return self.matched == self.length


def _borders(word: str) -> list[int]:
    """Return, for every prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for end in range(1, len(word)):
        while length and word[length] != word[end]:
            length = borders[length - 1]
        if word[length] == word[end]:
            length += 1
        borders[end] = length
    return borders
