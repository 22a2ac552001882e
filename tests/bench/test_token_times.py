"""How chunks of a stream become times of tokens, and bytes become chunks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.lab.bench.wire import LINE_BYTES_MAX, StreamedAnswer, error_text, split_tokens, spread_token_times


def test_a_chunk_with_k_tokens_shares_out_its_gap() -> None:
    """The first chunk's tokens all come with it; four tokens after 2 s are half a second apart."""
    assert spread_token_times([1.0, 3.0, 3.5], [2, 4, 1]).tolist() == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    assert spread_token_times([], []).tolist() == []


def test_tokens_are_dealt_evenly() -> None:
    assert split_tokens(7, 3) == [2, 2, 3]
    assert split_tokens(3, 3) == [1, 1, 1]
    assert split_tokens(2, 4) == [1, 0, 0, 1]
    assert split_tokens(1, 4) == [1, 0, 0, 0]


@given(tokens=st.integers(1, 200), gaps_s=st.lists(st.floats(0, 5), min_size=1, max_size=40), start_s=st.floats(0, 100))
def test_no_token_is_lost_and_time_never_runs_back(tokens: int, gaps_s: list[float], start_s: float) -> None:
    """As many times as tokens, between the first and the last chunk, the first exactly at the first chunk."""
    times_s = [start_s + sum(gaps_s[:index]) for index in range(len(gaps_s))]
    shares = split_tokens(tokens, len(times_s))
    shared = spread_token_times(times_s, shares).tolist()
    assert sum(shares) == len(shared) == tokens
    assert shared == sorted(shared)
    assert shared[0] == times_s[0]
    assert tokens == 1 or shared[-1] == times_s[-1]


def stream(*events: dict[str, object]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def text(value: str, **choice: object) -> dict[str, object]:
    return {"choices": [{"text": value, **choice}]}


def test_token_ids_in_a_chunk_say_how_many_it_carries() -> None:
    """Then nothing is dealt: the gap belongs to the chunk that had it."""
    answer = StreamedAnswer()
    answer.feed(stream(text("a", token_ids=[5])), 1.0)
    answer.feed(stream(text("bcd", token_ids=[6, 7, 8])), 4.0)
    answer.feed(stream(text("e", token_ids=[9]), {"choices": [], "usage": {"completion_tokens": 5}}), 5.0)
    assert answer.token_times_s().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_running_usage_in_each_chunk_says_it_too() -> None:
    answer = StreamedAnswer()
    answer.feed(stream(text("a") | {"usage": {"completion_tokens": 1}}), 1.0)
    answer.feed(stream(text("bc") | {"usage": {"completion_tokens": 3}}), 3.0)
    assert answer.token_times_s().tolist() == [1.0, 2.0, 3.0]


@given(st.lists(st.integers(1, 400), max_size=30))
def test_borders_of_packets_do_not_matter(cuts: list[int]) -> None:
    """Any cutting of the bytes gives the same answer."""
    whole = stream(text("ä"), text("b"), text("", finish_reason="stop")) + b"data: [DONE]\n\n"
    answer, at = StreamedAnswer(), 0
    for cut in sorted(cuts):
        answer.feed(whole[at:cut], 1.0)
        at = max(at, cut)
    answer.feed(whole[at:], 1.0)
    assert answer.verdict("") == ("finished", "")
    assert len(answer.chunk_times_s) == 2


def test_an_event_without_end_is_bounded() -> None:
    answer = StreamedAnswer()
    answer.feed(b"data: " + b"x" * (LINE_BYTES_MAX + 1), 1.0)
    assert answer.verdict("")[0] == "failed"
    assert "longer than" in answer.error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "too\\n long", "type": "x"}}', "too long"),
        (b'{"error": "no"}', "no"),
        (b"<html>\xff bad</html>", "<html>\ufffd bad</html>"),
        (b"", ""),
        (b"x" * 1000, "x" * 200),
    ],
)
def test_error_bodies_become_one_short_line(body: bytes, words: str) -> None:
    assert error_text(body) == words
