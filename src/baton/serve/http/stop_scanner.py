"""Stop strings in a stream: cut the text where one is complete, keep back what may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Cut a stream of text at the stop string that is complete first (the longest, where two end together).

    What comes out does not depend on how the text was cut into pieces. Every character costs a constant number of
    steps per stop string (Knuth, Morris and Pratt's automaton), however long the stop strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are the stop strings, none of them empty."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.stopped = False
        """True once a stop string was met: everything from it on is dropped."""

    def push(self, text: str) -> str:
        """Take the next piece of text, return what certainly precedes any stop string."""
        if not self._matchers:
            return text
        if self.stopped or self._is_harmless(text):
            return "" if self.stopped else text
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            met = [matcher.length for matcher in self._matchers if matcher.step(character)]
            if met:
                self.stopped, self._held = True, ""
                return whole[: end - max(met)]
        safe = len(whole) - max(matcher.matched for matcher in self._matchers)
        self._held = whole[safe:]
        return whole[:safe]

    def flush(self) -> str:
        """The text is over: return what was kept back, for it has become no stop string."""
        held, self._held = self._held, ""
        return held

    def _is_harmless(self, text: str) -> bool:
        """Nothing is kept back and no stop string can begin in `text`: the usual case, at the speed of `in`."""
        return not self._held and not any(matcher.first in text for matcher in self._matchers)


class _Matcher:
    """How much of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.first = stop[0]
        self.length = len(stop)
        self.matched = 0

    def step(self, character: str) -> bool:
        """Take one character; True when it completes the stop string. Never called again after that."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self._stop[self.matched] == character:
            self.matched += 1
        return self.matched == self.length


def _borders(word: str) -> list[int]:
    """For every prefix of `word`: the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for end in range(1, len(word)):
        while length and word[length] != word[end]:
            length = borders[length - 1]
        if word[length] == word[end]:
            length += 1
        borders[end] = length
    return borders
