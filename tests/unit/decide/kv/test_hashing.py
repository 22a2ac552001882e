"""Block hashes: names that say what a block holds and everything before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.decide.kv.hashing import HASH_BYTES, block_hashes, hashes_per_block, runs_per_block


def test_the_name_of_a_known_block_never_changes() -> None:
    """Names outlive the process on disk: a change here is a change of format, and has to be meant."""
    (name,) = block_hashes(range(16), block_tokens=16, cache_salt="tenant")
    assert len(name) == HASH_BYTES
    assert name.hex() == "8e571ebfa684a5961d7973c7fc575d5d"


def test_requests_under_different_salts_share_nothing() -> None:
    plain, salted = (block_hashes(range(64), block_tokens=16, cache_salt=salt) for salt in ("", "a"))
    assert not set(plain) & set(salted)


def test_a_changed_token_renames_its_block_and_all_after_it_but_none_before() -> None:
    tokens = list(range(64))
    changed = [*tokens[:20], 999, *tokens[21:]]
    before, after = block_hashes(tokens, block_tokens=16), block_hashes(changed, block_tokens=16)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False, False]


def test_a_tail_has_no_name_yet() -> None:
    assert [len(block_hashes(range(count), block_tokens=16)) for count in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(1, 5), st.integers(1, 4))
def test_larger_blocks_are_named_by_the_last_of_their_runs(tokens: list[int], hash_tokens: int, runs: int) -> None:
    """Two prompts have the same name for a block if and only if all their tokens up to its end are the same."""
    names = hashes_per_block(block_hashes(tokens, block_tokens=hash_tokens), runs)
    size = hash_tokens * runs
    assert len(names) == len(tokens) // size
    for index, name in enumerate(names):
        end = (index + 1) * size
        assert hashes_per_block(block_hashes(tokens[:end], block_tokens=hash_tokens), runs)[-1] == name
        for changed in (0, end - 1):
            other = [*tokens[:changed], tokens[changed] ^ 1, *tokens[changed + 1 :]]
            assert hashes_per_block(block_hashes(other, block_tokens=hash_tokens), runs)[index] != name


def test_blocks_of_one_run_have_the_names_that_they_always_had() -> None:
    hashes = block_hashes(range(64), block_tokens=16)
    assert hashes_per_block(hashes, runs_per_block(16, 16)) == hashes


def test_hosts_of_several_block_sizes_share_names_where_their_blocks_end_together() -> None:
    hashes = block_hashes(range(97), block_tokens=8)
    small, large = hashes_per_block(hashes, runs_per_block(16, 8)), hashes_per_block(hashes, runs_per_block(48, 8))
    assert large == small[2::3]
    assert len(large) == 2


@pytest.mark.parametrize(("block_tokens", "hash_tokens"), [(24, 16), (8, 16)])
def test_a_block_that_is_no_whole_number_of_runs_has_no_name(block_tokens: int, hash_tokens: int) -> None:
    with pytest.raises(AssertionError, match=rf"block of {block_tokens} .* runs of {hash_tokens}"):
        runs_per_block(block_tokens, hash_tokens)
