"""Translate and check grammars of structured output for llguidance. Runs inside of sandboxes only.

Source: llguidance (Earley parser over a lexer of regular-expression derivatives), https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from baton.compute.models.tokenizer import Tokenizer
from baton.compute.sandbox.messages import JSON_WHITESPACE, GrammarProblem
from baton.core.types import Grammar
from baton.move.clock import now_s

REASON_CHARS_MAX = 300
PLACES_S = 0.25
"""Time limit of the search for the invalid subschema of a grammar."""
LEXER_FUEL = 400_000
"""Limit of llguidance on the automata of one grammar. More takes seconds to compile, and hundreds of megabytes."""

_BEFORE = "\x02"
"""Character put before a text, so that SentencePiece adds no space to the text. Only its own byte token contains it."""


def parser_limits() -> LLParserLimits:
    """Return the limits of llguidance on the work for one grammar."""
    return LLParserLimits(verbose_errors=False, initial_lexer_fuel=LEXER_FUEL)


def grammar_source(grammar: Grammar) -> str:
    """Return a grammar as source text of llguidance. Raises ValueError with the reason if it is invalid."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, {"whitespace_pattern": JSON_WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice" | "grammar" | "lark":
            return grammar_from(grammar.kind, grammar.text)


def first_problem(grammars: Sequence[Grammar], trie: LLTokenizer) -> GrammarProblem | None:
    """Compile grammars and their first token masks. Return the first problem, or None if all are valid."""
    for index, grammar in enumerate(grammars):
        reason = grammar_problem(grammar, trie)
        if reason:
            is_schema = grammar.kind == "json_schema"
            place = problem_path(msgspec.json.decode(grammar.text), reason) if is_schema else ""
            return GrammarProblem(index, reason, place)
    return None


def grammar_problem(grammar: Grammar, trie: LLTokenizer | None = None) -> str:
    """Return the reason why a grammar is invalid, on one line, or an empty string if it is valid.

    trie: also compile the automata and the first token mask, as a worker does.
    """
    try:
        source = grammar_source(grammar)
    except (ValueError, RecursionError) as error:
        return _one_line(str(error))
    problem = LLMatcher.validate_grammar(source, limits=parser_limits())
    if problem or trie is None:
        return _one_line(problem)
    matcher = LLMatcher(trie, source, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher_problem(matcher)


def matcher_problem(matcher: LLMatcher) -> str:
    """Return the reason why a parser has failed, or an empty string. A failed parser would allow the text to end."""
    if not matcher.is_error():
        return ""
    reason = _one_line(matcher.get_error().replace("<non-verbose/>", ""))
    return "it matches no text" if reason.startswith("NoExtension") else reason


def problem_path(schema: object, problem: str) -> str:
    """Return the path of the innermost invalid subschema, such as `properties.a`.

    That is the innermost one that gives this problem when it is compiled alone.
    """
    steps: list[str] = []
    end_s = now_s() + PLACES_S
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    while True:
        found = None
        for path, child in _subschemas(schema):
            if now_s() > end_s:
                return ".".join(steps)
            alone = {**shared, **child} if isinstance(child, dict) else child
            if grammar_problem(Grammar(kind="json_schema", text=msgspec.json.encode(alone).decode())) == problem:
                found = path, child
                break
        if found is None:
            return ".".join(steps)
        steps.append(found[0])
        schema = found[1]


def _subschemas(schema: object) -> Iterator[tuple[str, object]]:
    if not isinstance(schema, dict):
        return
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(key)
        if isinstance(inner, dict):
            yield from ((f"{key}.{name}", child) for name, child in inner.items())
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(key)
        if isinstance(inner, list):
            yield from ((f"{key}.{index}", child) for index, child in enumerate(inner))
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield key, schema[key]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= REASON_CHARS_MAX else line[:REASON_CHARS_MAX] + " ..."


def token_trie(tokenizer: Tokenizer, *, vocab_tokens: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return llguidance's table of the bytes of every token. Takes up to 0.2 s for 49,000 tokens.

    Ids beyond the vocabulary have no text and are never allowed. A grammar's text never matches a special token.
    """
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_tokens, eos_token_ids[0]))
    return LLTokenizer(wrapper, eos_token=list(eos_token_ids))


class _Vocabulary:
    """A tokenizer with the attributes that `TokenizerWrapper` of llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, vocab_tokens: int, eos_token: int) -> None:
        self.eos_token_id = eos_token
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_tokens)]
        self.special_token_ids = [token for token in range(vocab_tokens) if tokenizer.is_special(token)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of bytes that the grammar forces. They continue a text, so no space is added."""
        decoded = text.decode(errors="replace")
        if not self._tokenizer.space_prefix:
            tokens = self._tokenizer.encode(decoded, add_special=False)
        else:
            tokens = self._tokenizer.encode(_BEFORE + decoded, add_special=False)
            mark = _BEFORE.encode()
            end = next((index for index, token in enumerate(tokens) if self.tokens[token].endswith(mark)), -1)
            tokens = tokens[end + 1 :]
        is_same = b"".join([self.tokens[token] for token in tokens]) == text
        is_plain = is_same and not any(self._tokenizer.is_special(token) for token in tokens)
        return tokens if is_plain else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Return the longest matching tokens of bytes, up to the first byte that no token matches.

        Used where the tokenizer normalizes the bytes, or reads them as a special token.
        """
        special = set(self.special_token_ids)
        by_bytes = {data: token for token, data in enumerate(self.tokens) if data and token not in special}
        longest = max(map(len, by_bytes))
        tokens: list[int] = []
        at = 0
        while at < len(text):
            sizes = range(min(longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in by_bytes), 0)
            if size == 0:
                break
            tokens.append(by_bytes[text[at : at + size]])
            at += size
        return tokens
