"""Block hashes: names that say what a block holds and everything before it."""

from __future__ import annotations

from baton.kv.hashing import HASH_BYTES, block_hashes


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
