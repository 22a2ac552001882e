"""How large a host's arena may be."""

from __future__ import annotations

import pytest

from baton.core.config import Config, KVConfig
from baton.core.errors import ConfigError
from baton.engine.hash_engine import hash_card
from baton.server.host import blocks_total, memory_free_bytes

CARD = hash_card()
LAYOUT = CARD.layout(block_tokens=16, dtype="float32")


def test_what_was_asked_for_is_what_there_is() -> None:
    assert blocks_total(Config(kv=KVConfig(blocks=7)), CARD, LAYOUT) == 7
    assert blocks_total(Config(kv=KVConfig(bytes=9 * LAYOUT.block_bytes + 1)), CARD, LAYOUT) == 9


@pytest.mark.parametrize("kv", [KVConfig(blocks=2**31), KVConfig(bytes=2**50)], ids=["in blocks", "in bytes"])
def test_an_arena_beyond_the_free_memory_is_refused_with_what_fits(kv: KVConfig) -> None:
    """Memory is reserved by use: taken at its word, the kernel would end the server under load."""
    if kv.blocks:
        assert kv.blocks * LAYOUT.block_bytes > memory_free_bytes(), "this machine is too large for this test"
    with pytest.raises(
        ConfigError, match=r"GiB of memory are free; set kv\.bytes or --kv-blocks to at most \d+ blocks"
    ):
        blocks_total(Config(kv=kv), CARD, LAYOUT)
