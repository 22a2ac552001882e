"""From tokens to text: what a client sees of a generation."""

from __future__ import annotations

import pytest

from baton.compute.hash_engine import hash_card
from baton.compute.models.tokenizer import load_tokenizer
from baton.core.errors import RequestError
from baton.core.types import OutputToken, Request, RequestId, Sampling, TokenLogprob
from baton.serve.http.choice import ChoiceDelta, ChoiceText, TextRules
from baton.serve.http.prompts import Echo, Prompt
from baton.serve.http.wire.sampling import for_choice
from baton.serve.live.hooks import Filters
from baton.serve.live.live_request import Finish, LiveRequest, Update

TOKENIZER = load_tokenizer(hash_card())
LENGTH = Finish(outcome="finished", reason="length")
EOS = 0


def make(
    *,
    stops: tuple[str, ...] = (),
    with_logprobs: bool = False,
    skip_special: bool = True,
    prompt: Prompt | None = None,
) -> ChoiceText:
    request = Request(id=RequestId("r"), prompt_tokens=1, output_tokens_max=99, arrived_at_s=0.0)
    rules = TextRules(
        tokenizer=TOKENIZER,
        stop_strings=stops,
        stop_token_ids=frozenset({EOS}),
        tokens_min=0,
        tokens_max=99,
        with_logprobs=with_logprobs,
        skip_special=skip_special,
        follows_text=True,
    )
    return ChoiceText(
        index=0,
        prompt_index=0,
        prompt=prompt or Prompt([5], None),
        live=LiveRequest(request, [5]),
        rules=rules,
        filters=Filters(()),
    )


def news(data: bytes, finish: Finish | None = None, *, first: int = 0) -> Update:
    """One token per byte."""
    tokens = TOKENIZER.encode("") + [3 + byte for byte in data]
    parts = [OutputToken(RequestId("r"), 1, first + i, t, TokenLogprob(t, -1.0)) for i, t in enumerate(tokens)]
    return Update(tokens=tuple(parts), finish=finish)


def test_a_character_over_many_tokens_comes_out_whole() -> None:
    choice = make()
    assert [choice.apply(news(bytes([byte]))).text for byte in "🙂!".encode()] == ["", "", "", "🙂", "!"]


@pytest.mark.parametrize(("skip_special", "text"), [(True, "a"), (False, "a<bos>")])
def test_special_tokens_are_text_only_if_they_are_wanted(text: str, *, skip_special: bool) -> None:
    choice = make(skip_special=skip_special)
    tokens = tuple(OutputToken(RequestId("r"), 1, index, token) for index, token in enumerate((3 + ord("a"), 1)))
    assert choice.apply(Update(tokens=tokens)).text == text


def test_half_a_character_at_the_end_is_shown_as_one_that_is_missing() -> None:
    choice = make()
    assert choice.apply(news("a🙂".encode()[:3])).text == "a"
    assert choice.apply(Update(finish=LENGTH)).text == "\ufffd"


def test_a_stop_string_may_be_completed_by_the_last_half_character() -> None:
    choice = make(stops=("b\ufffd",))
    assert choice.apply(news(b"ab\xf0", LENGTH)).text == "a"


def test_a_met_stop_string_ends_the_generation_as_finished() -> None:
    """Not as cancelled: the client got all the text it asked for."""
    choice = make(stops=("END",))
    assert choice.apply(news(b"say END now")).text == "say "
    assert choice.finish_reason == "stop"
    assert choice.output_tokens == 7
    assert choice.is_cut_short


def test_text_that_was_held_back_comes_with_the_end() -> None:
    choice = make(stops=("END",))
    assert choice.apply(news(b"say EN")).text == "say "
    assert choice.apply(Update(finish=LENGTH)).text == "EN"
    assert choice.finish_reason == "length"


def test_logprobs_come_with_the_text_of_their_tokens() -> None:
    """A token whose text is held back holds its entry back, so nothing is sent about text that is cut off later."""
    choice = make(stops=("END",), with_logprobs=True)
    assert [entry.offset for entry in choice.apply(news(b"aEN")).entries] == [0]
    assert [entry.offset for entry in choice.apply(news(b"b")).entries] == [1, 2, 3]
    assert choice.apply(news(b"END")).entries == ()


def test_the_stop_token_counts_but_is_not_shown() -> None:
    choice = make(with_logprobs=True)
    eos = OutputToken(RequestId("r"), 1, 1, EOS, TokenLogprob(EOS, -1.0))
    finish = Finish(outcome="finished", reason="stop")
    piece = choice.apply(Update(tokens=(*news(b"a").tokens, eos), finish=finish))
    assert (piece.text, len(piece.entries), choice.output_tokens) == ("a", 1, 2)


def test_an_echo_shifts_the_offsets() -> None:
    choice = make(with_logprobs=True, prompt=Prompt(TOKENIZER.encode("hé"), "hé", echo=Echo("hé", (0, 1, 1))))
    scores = tuple(TokenLogprob(token, -2.0) for token in TOKENIZER.encode("hé")[1:])
    [token] = news(b"a").tokens
    scored = OutputToken(token.request_id, 1, 0, token.token, token.logprob, scores)
    piece = choice.apply(Update(tokens=(scored,)))
    assert piece.text == "héa"
    assert [(entry.offset, entry.logprob is None) for entry in piece.entries] == [
        (0, True),
        (1, False),
        (1, False),
        (2, False),
    ]


def test_a_bad_end_is_an_error() -> None:
    with pytest.raises(RequestError, match="the worker died") as failed:
        make().apply(Update(finish=Finish(outcome="failed", message="the worker died")))
    assert failed.value.status == 500


def test_no_news_is_an_empty_piece() -> None:
    assert not make().apply(news(b""))
    assert ChoiceDelta("a")


def test_choice_0_keeps_the_clients_seed_and_the_others_get_their_own() -> None:
    sampling = Sampling(seed=41)
    seeds = [for_choice(sampling, choice, output_tokens_max=9).seed for choice in range(100)]
    assert seeds[0] == 41
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
