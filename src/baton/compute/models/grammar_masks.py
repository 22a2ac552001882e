"""Compute the tokens that a grammar allows next, for many requests, with a cache of parsers. Runs inside of a sandbox.

A handoff or a preemption moves no parser state: the request has its tokens and its grammar as text, and the next
worker's parser reads the output again, which takes about 2 us a token.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from baton.compute.models.grammar import grammar_source, matcher_problem, parser_limits
from baton.compute.sandbox.messages import PARSERS_MAX, MaskAnswer, MaskJob
from baton.core.errors import RequestError
from baton.core.types import GRAMMAR_FAILED, Grammar, RequestId

COMPILED_MAX = 128
"""The maximum number of compiled grammars. The least recently used one is dropped first."""
Key = TypeVar("Key")
Kept = TypeVar("Kept")


@dataclass(slots=True)
class _RequestParser:
    """A request's parser, and the number of output tokens that the parser has consumed."""

    grammar: Grammar
    matcher: LLMatcher
    consumed: int = field(default=0)


class GrammarMasks:
    """Follows the outputs of many requests. Not thread-safe."""

    def __init__(self, trie: LLTokenizer) -> None:
        self._trie = trie
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._parsers: OrderedDict[RequestId, _RequestParser] = OrderedDict()

    def answer(self, job: MaskJob) -> MaskAnswer:
        """Return the masks of a job, or the reason why its grammar is rejected."""
        parser = self._parsers.pop(job.request_id, None)
        if job.skipped and (parser is None or parser.grammar != job.grammar or parser.consumed != job.skipped):
            return MaskAnswer(is_unknown=True)
        try:
            if parser is None or not job.skipped:
                parser = _RequestParser(job.grammar, self._compile(job.grammar).deep_copy())
            rows = self._rows(parser, job)
        except RequestError as error:
            return MaskAnswer(problem=str(error))
        _store(self._parsers, job.request_id, parser, PARSERS_MAX)
        return MaskAnswer(rows)

    def _rows(self, parser: _RequestParser, job: MaskJob) -> list[bytes]:
        if job.output and not parser.matcher.consume_tokens(job.output):
            _check(parser.matcher)
        parser.consumed += len(job.output)
        rows = [_row(parser.matcher)]
        if job.drafts:
            ahead = parser.matcher.deep_copy()
            for token in job.drafts:
                if token in job.stop_token_ids or ahead.try_consume_tokens([token]) == 0:
                    break
                rows.append(_row(ahead))
        return rows

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = self._compiled.pop(grammar, None)
        if matcher is None:
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
    reason = matcher_problem(matcher)
    if reason:
        raise RequestError(f"{GRAMMAR_FAILED}: {reason}; send a simpler one")
