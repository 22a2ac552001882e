"""A server's KV events reach the prefix index: requests go to the server that has their prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from baton.cli.main import main
from baton.core.engine_config import EngineConfig
from baton.core.prefixes import EngineCacheChanged
from baton.core.types import HostId
from baton.decide.control.cluster_messages import ClusterEvent
from baton.decide.kv.hashing import block_hashes
from tests.engines.event_publisher import EventPublisher
from tests.engines.fake_engine import FakeEngine, servers
from tests.engines.fake_vllm import FakeVllm
from tests.engines.fleets import Baton, baton_over

PROMPT = [100 + token % 90 for token in range(1024)]
OURS = block_hashes(PROMPT, block_tokens=16)


def stored(*, name: int = 1) -> bytes:
    """All of the prompt, as one block that another client has brought into the cache."""
    event = {"type": "BlockStored", "block_hashes": [name], "parent_block_hash": None, "token_ids": PROMPT}
    return msgspec.msgpack.encode([1.0, [{**event, "block_size": len(PROMPT)}], 0])


def removed(*, name: int = 1) -> bytes:
    return msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [name]}], 0])


def followed(fake: FakeEngine, publisher: EventPublisher) -> EngineConfig:
    return replace(fake.config(), kv_events=publisher.address, kv_events_replay=publisher.replay_address)


class Changes:
    """The events of caches that the driver has been told."""

    def __init__(self, baton: Baton, patch: pytest.MonkeyPatch) -> None:
        self._seen = asyncio.Event()
        self._tell: Callable[[ClusterEvent], None] = baton.parts.driver.tell
        patch.setattr(baton.parts.driver, "tell", self._told)

    def _told(self, event: ClusterEvent) -> None:
        self._tell(event)
        if isinstance(event, EngineCacheChanged):
            self._seen.set()

    async def one(self) -> None:
        await self._seen.wait()
        self._seen.clear()


def test_a_prompt_goes_to_the_server_that_has_its_prefix(
    kv_engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(tmp_path / "log")

    async def run() -> None:
        fakes, publisher = [kv_engine(), kv_engine(), kv_engine()], EventPublisher()
        async with publisher, servers(*fakes):
            given = (fakes[0].config(), followed(fakes[1], publisher), fakes[2].config())
            async with baton_over(*given, log=log) as baton:
                changes = Changes(baton, monkeypatch)
                await publisher.publish(stored())
                await changes.one()
                pool = baton.parts.driver.pools[HostId("engine-1")]
                assert pool.held_tokens(OURS) == len(PROMPT)
                for number in range(3):
                    await baton.ask([*PROMPT, number + 40], 3)
                assert [len(fake.bodies) for fake in fakes] == [0, 3, 0]
                await publisher.publish(removed())
                await changes.one()
                assert pool.held_tokens(OURS) == 0
                baton.check()

    asyncio.run(run())
    assert main(["replay", log]) == 0
    capsys.readouterr()


def test_a_server_that_joins_late_tells_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages from before are repeated; after a restart its cache is empty again."""

    async def run() -> None:
        fake, publisher = FakeVllm(), EventPublisher()
        async with publisher, servers(fake):
            publisher.keep(stored())
            async with baton_over(followed(fake, publisher)) as baton:
                changes = Changes(baton, monkeypatch)
                while baton.parts.driver.pools[HostId("engine-0")].held_tokens(OURS) != len(PROMPT):
                    await changes.one()
                publisher.kept.clear()
                await fake.stop()
                await baton.joined(0)
                await fake.restart()
                await baton.joined(1)
                assert baton.parts.driver.pools[HostId("engine-0")].held_tokens(OURS) == 0

    asyncio.run(run())


def test_lost_events_empty_the_mirror(kv_engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server no longer has the lost message: it may have named any block. Later events are followed again."""

    async def run() -> None:
        fake, publisher = kv_engine(), EventPublisher()
        async with publisher, servers(fake), baton_over(followed(fake, publisher)) as baton:
            changes, pool = Changes(baton, monkeypatch), baton.parts.driver.pools[HostId("engine-0")]
            await publisher.publish(stored())
            await changes.one()
            assert pool.held_tokens(OURS) == len(PROMPT)
            publisher.keep(removed())
            publisher.kept.clear()
            await publisher.publish(removed(name=2))
            await changes.one()
            assert pool.held_tokens(OURS) == 0
            await publisher.publish(stored())
            await changes.one()
            assert pool.held_tokens(OURS) == len(PROMPT)
            baton.check()

    asyncio.run(run())
