"""Compute the tokens that a grammar allows next, for every request of a step, with a cache of parsers.

A handoff or a preemption moves no parser state: the request has its tokens and its grammar as text, and the next
worker's parser reads the output again, which takes about 2 us a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from baton.compute.models.grammar import grammar_source, parser_limits
from baton.core.errors import RequestError
from baton.core.step import Slice
from baton.core.types import Grammar, RequestId

COMPILED_MAX = 128
"""The maximum number of compiled grammars. The least recently used one is dropped first."""
PARSERS_MAX = 1024
"""The maximum number of requests with a parser. The oldest parser is dropped first, and rebuilt when needed."""
Key = TypeVar("Key")
Kept = TypeVar("Kept")


@dataclass(slots=True)
class _RequestParser:
    """A request's parser, and the output tokens that the parser has consumed."""

    grammar: Grammar
    matcher: LLMatcher
    consumed: list[int] = field(default_factory=list[int])


class GrammarMasks:
    """Follows the outputs of many requests. Not thread-safe."""

    def __init__(self, load_trie: Callable[[], LLTokenizer]) -> None:
        """`load_trie` is called when the first request with a grammar arrives, because it takes a while."""
        self._load_trie = load_trie
        self._trie: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._parsers: OrderedDict[RequestId, _RequestParser] = OrderedDict()

    def rows(self, part: Slice) -> list[bytes]:
        """Return a mask (one bit per token) for the slice's next token, and one more for each allowed draft.

        Raises RequestError if the grammar cannot be followed.
        """
        grammar = part.sampling.grammar
        assert grammar is not None, f"{part.request_id} has no grammar"
        known = part.start + part.count - part.drafts
        parser = self._advance(part.request_id, grammar, list(part.tokens[part.prompt_tokens : known]))
        rows = [_row(parser.matcher)]
        if part.drafts:
            ahead = parser.matcher.deep_copy()
            for token in part.tokens[known : known + part.drafts]:
                if token in part.sampling.stop_token_ids or ahead.try_consume_tokens([token]) == 0:
                    break
                rows.append(_row(ahead))
        return rows

    def _advance(self, request_id: RequestId, grammar: Grammar, output: Sequence[int]) -> _RequestParser:
        """Return a request's parser, which has consumed the whole output."""
        parser = self._parsers.pop(request_id, None)
        if parser is None or parser.grammar != grammar or parser.consumed != output[: len(parser.consumed)]:
            parser = _RequestParser(grammar, self._compile(grammar).deep_copy())
        new = list(output[len(parser.consumed) :])
        if new and not parser.matcher.consume_tokens(new):
            _check(parser.matcher)
        parser.consumed += new
        _store(self._parsers, request_id, parser, PARSERS_MAX)
        return parser

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = self._compiled.pop(grammar, None)
        if matcher is None:
            if self._trie is None:
                self._trie = self._load_trie()
            matcher = LLMatcher(self._trie, grammar_source(grammar), log_level=0, limits=parser_limits())
            _check(matcher)
        _store(self._compiled, grammar, matcher, COMPILED_MAX)
        return matcher


def _store(cache: OrderedDict[Key, Kept], key: Key, value: Kept, size_max: int) -> None:
    cache[key] = value
    if len(cache) > size_max:
        cache.popitem(last=False)


def _row(matcher: LLMatcher) -> bytes:
    row = matcher.compute_bitmask()
    _check(matcher)
    return row


def _check(matcher: LLMatcher) -> None:
    """Raise RequestError if the parser has failed, because it would then allow the text to end anywhere."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split())[:200]
        raise RequestError(f"the output's grammar cannot be followed: {reason}; send a simpler one", status=500)
