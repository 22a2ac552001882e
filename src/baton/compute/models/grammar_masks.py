"""Which tokens a grammar allows next, for every request of a step: a cache of parsers, rebuilt from the tokens so far.

A request that comes from another worker, or that was preempted, brings its tokens and its grammar as text. So there is
nothing to hand over: the parser reads the output again, which takes some 2 us a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from baton.compute.models.grammar import grammar_source, limits
from baton.core.errors import RequestError
from baton.core.step import Slice
from baton.core.types import Grammar, RequestId

COMPILED_MAX = 128
"""Grammars that are kept compiled, the least recently used given up first."""
FOLLOWED_MAX = 1024
"""Requests whose parsers are kept. One more costs the oldest: it is rebuilt where it is needed again."""
Key = TypeVar("Key")
Kept = TypeVar("Kept")


@dataclass(slots=True)
class _Followed:
    """A request's parser, and the output tokens that it has read."""

    grammar: Grammar
    matcher: LLMatcher
    read: list[int] = field(default_factory=list[int])


class GrammarMasks:
    """Follows the outputs of many requests. Not for two threads at once."""

    def __init__(self, load_trie: Callable[[], LLTokenizer]) -> None:
        """`load_trie` is called with the first grammar: who never sends one does not pay for it."""
        self._load_trie = load_trie
        self._trie: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._followed: OrderedDict[RequestId, _Followed] = OrderedDict()

    def rows(self, part: Slice) -> list[bytes]:
        """Return the masks for the slice's next tokens. See `AllowedTokens.rows`."""
        grammar = part.sampling.grammar
        assert grammar is not None, f"{part.request_id} has no grammar"
        known = part.start + part.count - part.drafts
        followed = self._follow(part.request_id, grammar, list(part.tokens[part.prompt_tokens : known]))
        rows = [_row(followed.matcher)]
        if part.drafts:
            ahead = followed.matcher.deep_copy()
            for token in part.tokens[known : known + part.drafts]:
                if token in part.sampling.stop_token_ids or ahead.try_consume_tokens([token]) == 0:
                    break
                rows.append(_row(ahead))
        return rows

    def _follow(self, request_id: RequestId, grammar: Grammar, output: Sequence[int]) -> _Followed:
        """Bring a request's parser to the end of its output."""
        followed = self._followed.pop(request_id, None)
        if followed is None or followed.grammar != grammar or followed.read != output[: len(followed.read)]:
            followed = _Followed(grammar, self._compile(grammar).deep_copy())
        new = list(output[len(followed.read) :])
        if new and not followed.matcher.consume_tokens(new):
            _check(followed.matcher)
        followed.read += new
        _keep(self._followed, request_id, followed, FOLLOWED_MAX)
        return followed

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = self._compiled.pop(grammar, None)
        if matcher is None:
            if self._trie is None:
                self._trie = self._load_trie()
            matcher = LLMatcher(self._trie, grammar_source(grammar), log_level=0, limits=limits())
            _check(matcher)
        _keep(self._compiled, grammar, matcher, COMPILED_MAX)
        return matcher


def _keep(cache: OrderedDict[Key, Kept], key: Key, value: Kept, most: int) -> None:
    cache[key] = value
    if len(cache) > most:
        cache.popitem(last=False)


def _row(matcher: LLMatcher) -> bytes:
    row = matcher.compute_bitmask()
    _check(matcher)
    return row


def _check(matcher: LLMatcher) -> None:
    """Raise RequestError where the parser has given up: it would then let the text end anywhere."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split())[:200]
        raise RequestError(f"the output's grammar cannot be followed: {reason}; send a simpler one", status=500)
