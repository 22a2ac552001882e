"""What every route that computes has in common: checked prompts, requests to the cluster, and how long they run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from starlette.types import Receive

from baton.core.types import Request, RequestId, Sampling
from baton.serve.http.arrival import Arrival
from baton.serve.http.prompts import Limits, Prompt, off_loop
from baton.serve.http.services import Services

Done = TypeVar("Done")


class Sender(Protocol):
    """What a body says of who asks, whatever it asks for."""

    @property
    def user(self) -> str | None: ...

    @property
    def priority(self) -> int | None: ...

    @property
    def cache_salt(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests to the cluster that one HTTP request makes."""

    arrival: Arrival
    sender: Sender
    serial: int

    def make(self, index: int, prompt: Prompt, sampling: Sampling, output_tokens_max: int) -> Request:
        """Make one of them. The key's name is the tenant; where none is needed, the client names itself."""
        return Request(
            id=RequestId(f"{self.arrival.request_id}-{self.serial}-{index}"),
            prompt_tokens=len(prompt.tokens),
            block_hashes=prompt.hashes,
            output_tokens_max=output_tokens_max,
            arrived_at_s=self.arrival.at_s,
            sampling=sampling,
            tenant=self.arrival.client or self.sender.user or "",
            priority=self.sender.priority or 0,
            cache_salt=self.sender.cache_salt or "",
        )


async def checked_prompts(
    services: Services, read: Callable[[], Sequence[Prompt]], sender: Sender, *, param: str, size: int
) -> list[Prompt]:
    """Read the prompts of a body of `size` bytes, in a thread if it is long. Raises RequestError (400).

    `param`: the field that holds them, for messages.
    """
    limits = Limits(
        request_tokens_max=services.gateway.request_tokens_max,
        block_tokens=services.settings.block_tokens,
        cache_salt=sender.cache_salt or "",
        param=param,
    )
    return await off_loop(
        lambda: [limits.check(prompt) for prompt in read()], size=size, inline_max=services.settings.inline_bytes_max
    )


async def all_of(works: Sequence[Awaitable[Done]]) -> list[Done]:
    """Do all at once. The first error ends the others, and is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(work)) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _awaited(work: Awaitable[Done]) -> Done:
    return await work


async def hang_up(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
