"""KV events of vLLM: both wire forms, Baton's hashes for them, and a subscription with lost messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from baton.core.engine_config import EnginesConfig, engine_of
from baton.core.errors import ConfigError
from baton.core.prefixes import CachedRun, EngineCacheChanged
from baton.core.types import HostId
from baton.decide.kv.hashing import block_hashes
from baton.integrations.engines.cache_mirror import (
    CacheMirror,
    EngineBlocksRemoved,
    EngineBlocksStored,
    EngineCacheCleared,
    EngineCacheEvent,
)
from baton.integrations.engines.kv_events import KvEvents, read_events
from tests.engines.event_publisher import EventPublisher

HOST = HostId("h")
PROMPT = [100 + token % 90 for token in range(64)]
OURS = block_hashes(PROMPT, block_tokens=16)


def stored(first: int, until: int, **fields: Any) -> EngineBlocksStored:
    """Blocks of 32 tokens of the prompt, whose names in the engine are their numbers."""
    parent = first - 1 if first else None
    given = {"hashes": range(first, until), "parent": parent, "tokens": PROMPT[32 * first : 32 * until]}
    return EngineBlocksStored(**{**given, "block_tokens": 32, **fields})


def mirror(blocks_max: int = 100) -> CacheMirror:
    return CacheMirror(HOST, 16, blocks_max)


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


MAP = {
    "type": "BlockStored",
    "block_hashes": [2**63 + 7, b"x" * 32],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [["salt"], None],
    "group_idx": 0,
    "session_id": "a field that Baton does not read",
}
ARRAY = ["BlockStored", [2**63 + 7, b"x" * 32], None, [1, 2, 3, 4], 2, None, "GPU", None, [["salt"], None], 0]
READ = EngineBlocksStored(
    hashes=[2**63 + 7, b"x" * 32],
    parent=None,
    tokens=[1, 2, 3, 4],
    block_tokens=2,
    salt_keys=[["salt"], None],
    medium="GPU",
    group=0,
)


@pytest.mark.parametrize("event", [MAP, ARRAY])
def test_both_wire_forms_are_read(event: object) -> None:
    assert read_events(payload(event)) == [READ]


def test_events_without_optional_fields_are_read() -> None:
    """Servers leave out fields that have their default, and older ones have fewer fields."""
    short = ["BlockStored", [1], None, [1, 2], 2]
    expected = EngineBlocksStored(hashes=[1], parent=None, tokens=[1, 2], block_tokens=2)
    assert read_events(payload(short)) == [expected]
    removed = [{"type": "BlockRemoved", "block_hashes": [1]}, ["BlockRemoved", [1]]]
    assert read_events(payload(*removed)) == [EngineBlocksRemoved([1])] * 2
    assert read_events(payload({"type": "AllBlocksCleared"}, ["AllBlocksCleared"])) == [EngineCacheCleared()] * 2


def test_the_salt_of_sglang_belongs_to_the_first_block_of_a_prompt() -> None:
    """SGLang has `cache_salt` in every block of a salted prompt."""
    block = {**MAP, "extra_keys": None, "cache_salt": "tenant", "session_id": None}
    first, later = read_events(payload(block, {**block, "parent_block_hash": 7}))
    assert isinstance(first, EngineBlocksStored)
    assert isinstance(later, EngineBlocksStored)
    assert (first.salt_keys, later.salt_keys) == ((("tenant",),), ())


@pytest.mark.parametrize("wrong", [{"type": "BlockMoved"}, ["BlockStored"], {"type": "BlockStored"}])
def test_an_unknown_event_is_an_error(wrong: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_events(payload(wrong))


# ---- the mirror


def test_blocks_get_the_hashes_of_requests() -> None:
    """One block of the server is two of Baton."""
    assert mirror().apply([stored(0, 2)]) == EngineCacheChanged(HOST, stored=(CachedRun(None, 0, OURS),))


def test_later_blocks_follow_their_parent() -> None:
    made = mirror()
    made.apply([stored(0, 1)])
    assert made.apply([stored(1, 2)]) == EngineCacheChanged(HOST, stored=(CachedRun(OURS[1], 2, OURS[2:]),))


def test_blocks_of_a_salted_prompt_get_salted_hashes() -> None:
    salted = block_hashes(PROMPT, block_tokens=16, cache_salt="tenant")
    changed = mirror().apply([stored(0, 2, salt_keys=[["tenant"], None])])
    assert changed == EngineCacheChanged(HOST, stored=(CachedRun(None, 0, salted),))


@pytest.mark.parametrize(
    "fields",
    [
        {"parent": 77},
        {"is_adapter": True},
        {"medium": "CPU"},
        {"group": 1},
        {"salt_keys": [["an image", 3], None]},
        {"salt_keys": [["one", "two"], None]},
        {"tokens": PROMPT[:31]},
    ],
)
def test_blocks_that_cannot_be_named_are_left_out(fields: dict[str, Any]) -> None:
    assert mirror().apply([stored(0, 1, **fields)]) is None


def test_removed_blocks_are_removed_once() -> None:
    made = mirror()
    made.apply([stored(0, 2)])
    assert made.apply([EngineBlocksRemoved([1], medium="CPU")]) is None
    assert made.apply([EngineBlocksRemoved([1, 9])]) == EngineCacheChanged(HOST, removed=OURS[2:])
    assert made.apply([EngineBlocksRemoved([1])]) is None


def test_only_the_net_change_of_a_message_is_told() -> None:
    """A block that is removed and cached again is a block that is there."""
    made = mirror()
    changed = made.apply([stored(0, 2), EngineBlocksRemoved([1]), stored(1, 2), EngineBlocksRemoved([0])])
    assert changed == EngineCacheChanged(
        HOST, stored=(CachedRun(OURS[1], 2, OURS[2:]),), removed=(*OURS[2:], *OURS[:2])
    )
    changed = made.apply([stored(0, 1), EngineCacheCleared(), stored(1, 2)])
    assert changed == EngineCacheChanged(HOST, is_cleared=True)


def test_blocks_of_another_size_are_refused_with_the_remedy() -> None:
    made = CacheMirror(HOST, 24, 100)
    assert made.apply([stored(0, 1)]) is None
    assert "--block-tokens" in made.problem


def test_the_mirror_starts_again_when_it_remembers_too_much() -> None:
    made = mirror(blocks_max=3)
    made.apply([stored(0, 2)])
    more: Sequence[EngineCacheEvent] = [stored(0, 2, hashes=[10, 11])]
    assert made.apply(more) == EngineCacheChanged(HOST, is_cleared=True)
    assert made.apply([stored(0, 2)]) is not None


# ---- the subscription


@asynccontextmanager
async def following(publisher: EventPublisher, *, replays: bool = True) -> AsyncGenerator[AsyncGenerator[Any]]:
    events = KvEvents(publisher.address, publisher.replay_address if replays else "", replay_s=30.0)
    try:
        async with aclosing(events.batches()) as batches:
            yield batches
    finally:
        events.close()


def removed(number: int) -> bytes:
    return payload(["BlockRemoved", [number]])


def numbers(batch: Sequence[EngineCacheEvent]) -> object:
    """Return the block that a message of `removed` names."""
    (event,) = batch
    return event.hashes[0] if isinstance(event, EngineBlocksRemoved) else "gap"


def test_earlier_messages_are_repeated_and_lost_ones_fetched() -> None:
    async def run() -> list[object]:
        async with EventPublisher() as publisher:
            publisher.keep(removed(0))
            async with following(publisher) as batches:
                seen = [numbers(await anext(batches))]
                publisher.keep(removed(1))
                publisher.keep(removed(2))
                await publisher.publish(removed(3))
                return [*seen, *[numbers(await anext(batches)) for _ in range(3)]]

    assert asyncio.run(run()) == [0, 1, 2, 3]


def test_messages_that_the_server_has_dropped_are_a_gap() -> None:
    async def run() -> list[object]:
        async with EventPublisher() as publisher:
            publisher.keep(removed(0))
            async with following(publisher) as batches:
                seen = [numbers(await anext(batches))]
                publisher.keep(removed(1))
                publisher.keep(removed(2))
                del publisher.kept[1]
                await publisher.publish(removed(3))
                return [*seen, *[numbers(await anext(batches)) for _ in range(3)]]

    assert asyncio.run(run()) == [0, "gap", 2, 3]


def test_without_a_replay_address_a_lost_message_is_a_gap() -> None:
    async def run() -> list[object]:
        async with EventPublisher() as publisher, following(publisher, replays=False) as batches:
            first = asyncio.ensure_future(anext(batches))
            await publisher.publish(removed(0))
            seen = [numbers(await first)]
            publisher.keep(removed(1))
            await publisher.publish(b"what is no message")
            return [*seen, *[numbers(await anext(batches)) for _ in range(2)]]

    assert asyncio.run(run()) == [0, "gap", "gap"]


def test_addresses_of_events_are_checked() -> None:
    server = msgspec.structs.replace(engine_of("http://a:1"), kv_events="http://a:2")
    other = msgspec.structs.replace(engine_of("llamacpp=http://b:1"), kv_events="tcp://b:2")
    assert EnginesConfig(servers=(server, other)).problems() == [
        "engines.servers: 'http://a:2' is no ZMQ address: write tcp://HOST:PORT or ipc://PATH",
        "engines.servers has kv_events for a server of llama.cpp, which has none: leave them out",
    ]


def test_an_address_that_cannot_be_reached_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="tcp://nowhere is no address of KV events"):
        KvEvents("tcp://nowhere", "", replay_s=1.0)
