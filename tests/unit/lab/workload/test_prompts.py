"""Prompts share exactly what their requests share, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from baton.lab.workload.prompts import PromptMaker
from baton.lab.workload.request import TraceRequest


def request(input_tokens: int, ids: list[int], block_tokens: int = 16) -> TraceRequest:
    ids = ids[: -(-input_tokens // block_tokens)]
    return TraceRequest(
        at_s=0.0,
        input_tokens=input_tokens,
        output_tokens=1,
        prefix_ids=tuple(ids),
        prefix_block_tokens=block_tokens,
    )


ids = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=12)


@given(length=st.integers(1, 300), ids=ids, vocab_tokens=st.integers(2, 200_000), seed=st.integers(0, 2**63))
def test_a_prompt_has_its_length_and_legal_ids(length: int, ids: list[int], vocab_tokens: int, seed: int) -> None:
    tokens = PromptMaker(seed=seed, vocab_tokens=vocab_tokens).token_ids(request(length, ids), 3)
    assert len(tokens) == length
    assert all(0 <= token < vocab_tokens for token in tokens)


@given(shared=st.lists(st.integers(0, 50), min_size=1, max_size=6), lengths=st.tuples(*[st.integers(1, 300)] * 2))
def test_equal_leading_ids_give_equal_leading_tokens(shared: list[int], lengths: tuple[int, int]) -> None:
    """And the first block that differs gives other tokens (with 16 tokens a block, never the same by chance)."""
    maker = PromptMaker(seed=1)
    one, two = request(lengths[0], [*shared, 100]), request(lengths[1], [*shared, 200])
    both = min(len(shared) * 16, *lengths)
    first, second = maker.token_ids(one, 0), maker.token_ids(two, 1)
    assert first[:both] == second[:both]
    if min(lengths) >= len(shared) * 16 + 16:
        assert first[both : both + 16] != second[both : both + 16]
    assert maker.text(one, 0).split()[:both] == maker.text(two, 1).split()[:both]


def test_a_caller_that_changes_its_prompt_changes_no_other() -> None:
    """Tokens of a prefix are computed once for all prompts that follow each other with it."""
    maker = PromptMaker(seed=1)
    first = maker.token_ids(request(32, [1, 2]), 0)
    expected = first.copy()
    first.clear()
    assert maker.token_ids(request(32, [1, 2]), 1) == expected


def test_requests_without_ids_share_nothing() -> None:
    maker = PromptMaker(seed=1)
    alone = TraceRequest(at_s=0.0, input_tokens=32, output_tokens=1)
    prompts = {tuple(maker.token_ids(alone, index)[:8]) for index in range(500)}
    assert len(prompts) == 500
    assert tuple(PromptMaker(seed=2).token_ids(alone, 0)[:8]) not in prompts


def test_text_has_one_word_a_token() -> None:
    text = PromptMaker(seed=1).text(request(40, [1, 2]), 0)
    assert len(text.split()) == 40
    assert text.isascii()


def test_another_process_makes_the_same_prompt() -> None:
    """Nothing depends on PYTHONHASHSEED."""
    program = (
        "from baton.lab.workload.prompts import PromptMaker; from baton.lab.workload.request import TraceRequest; "
        "print(PromptMaker(seed=7).token_ids(TraceRequest(at_s=0.0, input_tokens=24, output_tokens=1, "
        "prefix_ids=(5,), prefix_block_tokens=16), 2))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = PromptMaker(seed=7).token_ids(request(24, [5]), 2)
    assert outputs == {f"{here}\n"}
