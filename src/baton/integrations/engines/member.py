"""A configured server of another engine, as the fleet keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from baton.compute.models.tokenizer import Tokenizer
from baton.core.engine_config import Engine, EngineConfig
from baton.core.types import HostId, WorkerId
from baton.integrations.engines.port import EngineServer
from baton.integrations.engines.process import EngineProcess
from baton.integrations.engines.worker import EngineWorker
from baton.integrations.llamacpp import LlamaCppServer
from baton.integrations.openai import OpenAiServer
from baton.integrations.sglang import SglangServer
from baton.integrations.vllm.client import VllmServer

_CLIENTS: Mapping[Engine, Callable[..., EngineServer]] = {
    "vllm": VllmServer,
    "sglang": SglangServer,
    "llamacpp": LlamaCppServer,
}


@dataclass(slots=True)
class Member:
    """A configured server."""

    config: EngineConfig
    worker: WorkerId
    host: HostId
    server: EngineServer
    process: EngineProcess | None = None
    """The server's process, if Baton has started it."""
    link: EngineWorker | None = None
    """Worker that sends requests to the server. None: the server has not joined."""
    watching: asyncio.Task[None] | None = None
    """Checks the server until it is removed."""
    following: asyncio.Task[None] | None = None
    """Receives the server's KV events while it has joined, if it publishes them."""
    context_tokens: int = 0
    """Maximum tokens of a request, read when the server joined. 0: not known."""
    said: str = ""
    """Last problem that was printed, so that it is not repeated."""
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the server must be checked at once."""

    async def end(self) -> None:
        """End all work for the server."""
        for task in (self.watching, self.following):
            if task is not None:
                task.cancel()
        if self.link is not None:
            self.link.stop()
        await self.server.close()


def client_of(config: EngineConfig, key: str, tokenizer: Tokenizer, *, answer_s: float) -> EngineServer:
    """Return the client of a server. `key`: its bearer key. `answer_s`: deadline in seconds of all but generations."""
    if config.engine == "openai":
        return OpenAiServer(config, key, tokenizer, answer_s=answer_s)
    return _CLIENTS[config.engine](config.url, key, answer_s=answer_s)


def can_serve(members: Iterable[Member]) -> bool:
    """Return whether these servers have every role that a request needs."""
    roles = {member.config.role for member in members}
    return "mixed" in roles or {"prefill", "decode"} <= roles
