"""Reasoning is separated from the answer, however the text is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.serve.http.reasoning import ReasoningSplitter


def split(
    pieces: list[str], prompt: str = "user: hi\nassistant: ", *, constrained: bool = False, kept: bool = True
) -> tuple[str, str]:
    splitter = ReasoningSplitter(prompt, is_constrained=constrained, is_kept=kept)
    found = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return "".join(reasoning for reasoning, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("<think>\nwhy not\n</think>\n\nyes", "", ("why not", "yes")),
        ("\n<think> a < b </think>c</think>", "", ("a < b", "c</think>")),
        ("yes <think>no</think>", "", ("", "yes <think>no</think>")),
        (" <thin", "", ("", " <thin")),
        ("<think>unfinished </thi", "", ("unfinished </thi", "")),
        ("why\n</think>\nyes", "<|assistant|><think>\n", ("why", "yes")),
        ("yes</think>", "<think>\n\n</think>\n\n", ("", "yes</think>")),
        ("", "", ("", "")),
        ("<think></think>", "", ("", "")),
    ],
)
def test_the_reasoning_is_before_the_answer(text: str, prompt: str, expected: tuple[str, str]) -> None:
    assert split([text], prompt) == expected
    assert split(list(text), prompt) == expected


def test_a_grammar_leaves_no_room_for_an_opened_reasoning() -> None:
    assert split(['{"a": 1}'], "<think>\n", constrained=True) == ("", '{"a": 1}')


def test_reasoning_that_is_not_wanted_is_dropped() -> None:
    assert split(list("<think>why</think>yes"), kept=False) == ("", "yes")


PARTS = st.sampled_from(["<think>", "</think>", "<", "/think>", " ", "\n", "a", "think", "é"])


@given(st.lists(PARTS, max_size=12).map("".join), st.data())
def test_the_pieces_do_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces) == split([text])
