"""Stop strings: the same cut, however the text comes in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.serve.http.stop_scanner import StopScanner

LETTERS = "ab c"
TEXTS = st.text(LETTERS, max_size=40)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)


def cut_at_first_stop(text: str, stops: list[str]) -> str:
    """The definition: the stop string that is complete first ends the text; of two that end together, the longest."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(len(stop) for stop in met)]
    return text


def streamed(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    scanner = StopScanner(stops)
    out = [scanner.push(piece) for piece in pieces]
    return [*out, scanner.flush()], scanner.stopped


@given(pieces=st.lists(st.text(LETTERS, max_size=4), max_size=20), stops=STOPS)
def test_any_cutting_into_pieces_gives_the_text_up_to_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    """Streamed output put together equals the whole text cut at the first stop string."""
    text = "".join(pieces)
    out, stopped = streamed(pieces, stops)
    assert "".join(out) == cut_at_first_stop(text, stops)
    assert stopped == any(stop in text for stop in stops)


@given(text=TEXTS, stops=STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    """What is out is all but the longest end of the text that begins a stop string: nobody waits for nothing."""
    scanner = StopScanner(stops)
    out = scanner.push(text)
    if not scanner.stopped:
        begun = [stop[:size] for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        assert len(text) - len(out) == max(map(len, begun), default=0)


def test_a_stop_string_over_three_pieces_is_found() -> None:
    assert streamed(["say E", "N", "D now"], ["END"]) == (["say ", "", "", ""], True)


def test_what_turned_out_to_be_no_stop_string_is_sent() -> None:
    assert streamed(["say E", "Nough"], ["END"]) == (["say ", "ENough", ""], False)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    """`bc` is complete one character before `abcd`, also when all come in one piece."""
    assert streamed(["abcd"], ["abcd", "bc"]) == (["a", ""], True)


def test_nothing_comes_out_after_a_stop() -> None:
    assert streamed(["aXb", "c", "X"], ["X"]) == (["a", "", "", ""], True)
