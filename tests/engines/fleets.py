"""Baton without HTTP over running servers of another engine, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from baton.compute.hash_engine import hash_card
from baton.core.config import Config
from baton.core.engine_config import EngineConfig, EnginePodsConfig, EnginesConfig, engine_of
from baton.core.types import Request, RequestId, Sampling
from baton.decide.kv.hashing import block_hashes
from baton.integrations.engines.fleet import EngineFleet
from baton.integrations.engines.pods import EnginePods
from baton.integrations.engines.process import EngineProcess
from baton.move.clock import now_s
from baton.serve.live.assembly import Parts, assemble
from baton.serve.live.live_request import Finish, LiveRequest

_numbers = count()
GREEDY = Sampling(temperature=0.0)


@dataclass(slots=True)
class Baton:
    """The driving half of a server, with its output."""

    parts: Parts
    fleet: EngineFleet
    told: list[str]
    changed: asyncio.Event
    """Set by each line that is told."""

    async def joined(self, number: int) -> None:
        """Wait until this many servers take requests."""
        while self.fleet.joined != number:
            self.changed.clear()
            await self.changed.wait()

    async def said(self, text: str) -> None:
        """Wait until a line with this text was told."""
        while not any(text in line for line in self.told):
            self.changed.clear()
            await self.changed.wait()

    def submit(self, prompt: Sequence[int], tokens: int, sampling: Sampling = GREEDY) -> LiveRequest:
        request = Request(
            id=RequestId(f"r{next(_numbers)}"),
            prompt_tokens=len(prompt),
            block_hashes=block_hashes(prompt, block_tokens=self.parts.driver.layout.block_tokens),
            output_tokens_max=tokens,
            arrived_at_s=now_s(),
            sampling=sampling,
        )
        return self.parts.gateway.submit(request, prompt)

    async def ask(self, prompt: Sequence[int], tokens: int, sampling: Sampling = GREEDY) -> list[int]:
        """Return the answer to a prompt."""
        live = self.submit(prompt, tokens, sampling)
        finish = await finished(live)
        assert finish.outcome == "finished", finish
        return live.tokens[len(prompt) :]

    def check(self) -> None:
        """Assert that no request and no block is left (INV-2, INV-4)."""
        assert not self.parts.driver.live
        for pool in self.parts.driver.pools.values():
            pool.check()
            assert pool.view().blocks_used == 0


async def finished(live: LiveRequest) -> Finish:
    """Wait for the end of a request."""
    while True:
        update = await live.next()
        if update.finish is not None:
            return update.finish


async def tokens_of(live: LiveRequest, number: int) -> None:
    """Wait until a request has this many output tokens."""
    while live.output_tokens < number:
        update = await live.next()
        assert update.finish is None, update.finish


@asynccontextmanager
async def baton_over(
    *servers: str | EngineConfig,
    silent_s: float = 30.0,
    key: str = "",
    log: str = "",
    joins: int | None = None,
    processes: Sequence[EngineProcess] = (),
    pods: EnginePods | None = None,
) -> AsyncIterator[Baton]:
    """Run Baton over servers, named as by `--engine-url`, once `joins` of them (default: all) have joined."""
    given = tuple(engine_of(server) if isinstance(server, str) else server for server in servers)
    found = EnginePodsConfig() if pods is None else pods.config
    engines = EnginesConfig(servers=given, pods=found, check_s=0.02, silent_s=silent_s, key=key)
    config = Config(model="hash", engines=engines, log=log)
    assert not config.problems() + config.lacks()
    parts = assemble(config, hash_card())
    told: list[str] = []
    changed = asyncio.Event()

    def tell(line: str) -> None:
        told.append(line)
        changed.set()

    baton = Baton(parts, EngineFleet(parts, tell, processes, pods), told, changed)
    await baton.fleet.start(changed.set)
    try:
        await asyncio.wait_for(baton.joined(len(servers) if joins is None else joins), 30)
        if joins != 0:
            parts.gateway.state = "ready"
        yield baton
    finally:
        await baton.fleet.stop()
        if parts.driver.log is not None:
            parts.driver.log.close()
