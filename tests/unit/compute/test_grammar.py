"""Masks of a grammar do not depend on where a parser starts, and a failed parser fails the request."""

from __future__ import annotations

import json

import numpy as np
import pytest

from baton.compute.hash_engine import EOS_TOKEN, VOCAB_TOKENS, hash_card
from baton.compute.load_engine import EngineChoice, load_engine
from baton.compute.models import grammar_masks
from baton.compute.models.grammar import grammar_problem, problem_path, token_trie
from baton.compute.models.grammar_masks import GrammarMasks
from baton.compute.models.tokenizer import ByteTokenizer
from baton.compute.sampler import sample
from baton.compute.sandbox.messages import MaskJob
from baton.compute.step_engine import StepEngine
from baton.core.config import SandboxConfig
from baton.core.step import Slice, SliceResult, Step
from baton.core.types import BlockId, Grammar, RequestId, Sampling

PROMPT = [5, 6, 7]
CODE = Grammar(kind="regex", text="[a-c]{2}-[0-9]+")
TOKENIZER = ByteTokenizer()
LIMITS = SandboxConfig()


TRIE = token_trie(TOKENIZER, vocab_tokens=VOCAB_TOKENS, eos_token_ids=(EOS_TOKEN,))


def _masks() -> GrammarMasks:
    return GrammarMasks(TRIE)


def _rows(masks: GrammarMasks, part: Slice) -> list[bytes]:
    """Return the masks of a slice, whose parser reads the whole output again."""
    end = part.start + part.count
    job = MaskJob(
        request_id=part.request_id,
        grammar=part.sampling.grammar or CODE,
        output=list(part.tokens[part.prompt_tokens : end - part.drafts]),
        drafts=list(part.tokens[end - part.drafts : end]),
        stop_token_ids=part.sampling.stop_token_ids,
    )
    answer = masks.answer(job)
    assert not answer.problem, answer.problem
    return answer.rows


def _part(output: str, *, name: str = "r", grammar: Grammar = CODE, sampling: Sampling | None = None) -> Slice:
    tokens = [*PROMPT, *TOKENIZER.encode(output)]
    return Slice(
        request_id=RequestId(name),
        tokens=tokens,
        start=0,
        count=len(tokens),
        block_table=[BlockId(0)],
        sample=True,
        sampling=sampling or Sampling(grammar=grammar),
        prompt_tokens=len(PROMPT),
    )


def _allowed(masks: GrammarMasks, part: Slice) -> list[str]:
    (row,) = _rows(masks, part)
    return [TOKENIZER.token_text(token) for token in range(VOCAB_TOKENS) if row[token // 8] >> token % 8 & 1]


def test_each_token_narrows_the_allowed_tokens() -> None:
    masks = _masks()
    assert _allowed(masks, _part("")) == ["a", "b", "c"]
    assert _allowed(masks, _part("ab")) == ["-"]
    assert _allowed(masks, _part("ab-")) == list("0123456789")
    assert _allowed(masks, _part("ab-7")) == ["<eos>", *"0123456789"]


def test_another_worker_continues_a_constrained_request() -> None:
    """A new parser, and one that saw other tokens of the request, give the same mask."""
    here, there = _masks(), _masks()
    _allowed(here, _part("ab"))
    assert _allowed(there, _part("ab-12")) == _allowed(here, _part("ab-12"))
    assert _allowed(here, _part("cc")) == ["-"]  # the same name with another output
    other = Grammar(kind="regex", text="x?ab?")
    assert _allowed(here, _part("xa", grammar=other)) == ["<eos>", "b"]


def test_caches_are_bounded_and_nothing_depends_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """INV-9. With caches of one request and one grammar, two of each get the same masks as alone."""
    monkeypatch.setattr(grammar_masks, "COMPILED_MAX", 1)
    monkeypatch.setattr(grammar_masks, "PARSERS_MAX", 1)
    masks, digits = _masks(), Grammar(kind="regex", text="[0-9]{2}")
    for _ in range(3):
        assert _allowed(masks, _part("ab", name="one")) == ["-"]
        assert _allowed(masks, _part("4", name="two", grammar=digits)) == list("0123456789")
    assert (len(masks._compiled), len(masks._parsers)) == (1, 1)


def test_an_output_that_does_not_match_fails_its_request_instead_of_going_on_unconstrained() -> None:
    """llguidance then allows the end of the text, which would be invalid output."""
    masks = _masks()
    for _ in range(2):
        with pytest.raises(AssertionError, match="grammar cannot be followed"):
            _rows(masks, _part("abc"))
    assert _allowed(masks, _part("ab")) == ["-"]


def _engine(limits: SandboxConfig = LIMITS) -> StepEngine:
    card = hash_card()
    layout = card.layout(block_tokens=16, dtype="uint8")
    choice = EngineChoice(kind="hash", sandbox=limits)
    return load_engine(card, layout, memoryview(bytearray(4 * layout.block_bytes)), choice=choice)


def _executed(engine: StepEngine, *parts: Slice) -> list[SliceResult]:
    """Execute a step again until no slice has a late mask: the sandbox takes a moment to start."""
    results: list[SliceResult] = []
    while not results or any(result.token is None and not result.failure for result in results):
        results = list(engine.execute(Step(parts)).slices)
    return results


def test_a_request_with_a_broken_grammar_does_not_stop_another() -> None:
    """However many of them are in the step, they do not count as a failure of the worker."""
    broken = [_part("abc", name=f"broken-{number}") for number in range(3)]
    fine, *failed = _executed(_engine(), _part("ab"), *broken)
    assert fine.token == TOKENIZER.encode("-")[0]
    assert all("cannot be followed" in result.failure for result in failed)
    assert len(failed) == 3


SLOW = Grammar(kind="regex", text="((a{1000}){1000}){1000}")
"""Its first mask takes a second."""


def test_a_slow_grammar_delays_its_own_request_alone() -> None:
    engine = _engine()
    _executed(engine, _part("ab"))
    free = _part("", name="free", sampling=Sampling())
    late, fine = engine.execute(Step((_part("", name="slow", grammar=SLOW), free))).slices
    assert late.token is None
    assert fine.token is not None
    assert _executed(engine, _part("", name="slow", grammar=SLOW))[0].token == TOKENIZER.encode("a")[0]


def test_a_grammar_that_ends_its_sandbox_fails_alone_and_is_refused_at_last() -> None:
    """A sandbox that is lost for another reason counts too, so the refusal may begin with the second request."""
    engine = _engine(SandboxConfig(cpu_s=0.05, wall_s=60.0, processes=1))
    refused: list[bool] = []
    for attempt in range(4):
        failed, fine = _executed(engine, _part("", name=f"poison-{attempt}", grammar=SLOW), _part("ab"))
        refused.append("2 sandbox processes died on it" in failed.failure)
        assert refused[-1] or "CPU time" in failed.failure
        assert fine.token == TOKENIZER.encode("-")[0]
    assert refused in ([False, False, True, True], [False, True, True, True])


def test_a_request_goes_on_in_a_new_sandbox_and_under_another_output() -> None:
    engine = _engine()
    for output, expected in (("a", "abc"), ("ab", "-"), ("cc", "-"), ("c", "abc"), ("cc-", "0123456789")):
        (result,) = _executed(engine, _part(output))
        assert TOKENIZER.token_text(result.token or 0) in expected
        if output == "ab":
            for process in engine._masks._processes:
                if process._sandbox is not None:
                    process._sandbox.kill()


def test_special_tokens_are_not_text() -> None:
    """A string may contain the letters of an end token, but not the token."""
    anything = Grammar(kind="json_schema", text='{"type": "string"}')
    allowed = _allowed(_masks(), _part('"a', grammar=anything))
    assert "x" in allowed
    assert not {"<eos>", "<bos>", "<unk>"} & set(allowed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("output_tokens_min", [0, 9])
def test_the_sampler_draws_only_what_is_allowed(temperature: float, top_p: float, output_tokens_min: int) -> None:
    """For any bias, penalties, top_p and minimum length."""
    eos = TOKENIZER.encode("c")[0]

    class Rows:
        def rows(self) -> list[bytes]:
            return [(1 << 7 | 1 << eos).to_bytes(40, "little")]

    logits = np.linspace(9, -9, VOCAB_TOKENS, dtype=np.float32)[None]
    for seed in range(20):
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            presence_penalty=1.0,
            logit_bias=((40, 100.0),),
            stop_token_ids=(eos,),
            output_tokens_min=output_tokens_min,
            seed=seed,
            grammar=CODE,
        )
        part = _part("ab", sampling=sampling)
        part = Slice(**{name: getattr(part, name) for name in part.__slots__ if name != "allowed"}, allowed=Rows())
        ((token, _),) = sample(logits, [part])
        assert token in ((7,) if output_tokens_min else (7, eos))


def test_the_grammar_wins_over_the_minimum_length() -> None:
    sampling = Sampling(
        stop_token_ids=(EOS_TOKEN,), output_tokens_min=50, grammar=Grammar(kind="choice", text='["ab"]')
    )
    (result,) = _executed(_engine(), _part("ab", sampling=sampling))
    assert result.token == EOS_TOKEN

    class Rows:
        def rows(self) -> list[bytes]:
            return [(1 << EOS_TOKEN).to_bytes(40, "little")]

    part = _part("ab", sampling=sampling)
    part = Slice(**{name: getattr(part, name) for name in part.__slots__ if name != "allowed"}, allowed=Rows())
    assert sample(np.zeros((1, VOCAB_TOKENS), dtype=np.float32), [part])[0][0] == EOS_TOKEN


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(a", "unclosed group"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", "root ::= (", ""),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"not": {"type": "null"}}', "Unimplemented keys"),
    ],
)
def test_an_invalid_grammar_gives_its_reason_on_one_line(kind: str, text: str, reason: str) -> None:
    problem = grammar_problem(Grammar(kind=kind, text=text))
    assert problem
    assert reason in problem
    assert "\n" not in problem


def test_the_invalid_part_of_a_schema_is_found() -> None:
    wrong = {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "objekt"}]}}
    schema = {"type": "object", "properties": {"fine": {"type": "string"}, "rows": wrong}}
    problem = grammar_problem(Grammar(kind="json_schema", text=json.dumps(schema)))
    assert problem_path(schema, problem) == "properties.rows.items.anyOf.1"


def test_whitespace_in_json_is_bounded() -> None:
    """Without a bound, a model may write spaces forever."""
    masks, schema = _masks(), Grammar(kind="json_schema", text='{"type": "object"}')
    assert " " in _allowed(masks, _part("{", grammar=schema))
    assert " " not in _allowed(masks, _part("{ ", grammar=schema))
    assert "\n" not in _allowed(masks, _part("{\n ", grammar=schema))


def test_drafts_get_masks_up_to_the_first_forbidden_one() -> None:
    """The parser of the request stays at the end of its output, so rejected drafts do not change it."""
    masks = _masks()
    part = _part("ab-12")
    guessed = Slice(**{name: getattr(part, name) for name in part.__slots__ if name != "drafts"}, drafts=3)
    assert len(_rows(masks, guessed)) == 4
    wrong = _part("abx12")
    guessed = Slice(**{name: getattr(wrong, name) for name in wrong.__slots__ if name != "drafts"}, drafts=3)
    assert len(_rows(masks, guessed)) == 1
    assert _allowed(masks, _part("ab")) == ["-"]


def test_a_draft_that_ends_the_text_is_the_last_one() -> None:
    part = _part("ab-1", sampling=Sampling(grammar=CODE, stop_token_ids=(EOS_TOKEN,)))
    values = {name: getattr(part, name) for name in part.__slots__}
    values |= {"tokens": [*part.tokens, EOS_TOKEN, EOS_TOKEN], "count": part.count + 2, "drafts": 2}
    assert len(_rows(_masks(), Slice(**values))) == 1


class _Normalizing(ByteTokenizer):
    """Changes text, as a tokenizer with Unicode normalization does."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return super().encode(text.upper(), add_special=add_special)


def test_a_tokenizer_that_changes_its_text_does_not_change_the_grammar() -> None:
    """Forced text is then written with tokens of the same bytes."""
    trie = token_trie(_Normalizing(), vocab_tokens=VOCAB_TOKENS, eos_token_ids=(EOS_TOKEN,))
    masks, forced = GrammarMasks(trie), Grammar(kind="choice", text='["one and only"]')
    for end in range(len("one and only")):
        assert _allowed(masks, _part("one and only"[:end], grammar=forced)) == ["one and only"[end]]
