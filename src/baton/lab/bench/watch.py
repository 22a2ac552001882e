"""Poll the roles and queues of a Baton server's workers during a run, for its page."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import aiohttp
import msgspec
from msgspec import Struct

from baton.core.types import HostId, Role, WorkerId, WorkerView
from baton.lab.bench.client import Client
from baton.lab.report.timeline import Timeline
from baton.move.clock import now_s

POLL_S = 0.5
"""Time between two polls: rare enough not to disturb the measurement."""

ANSWER_S = 5.0
"""Time limit of a poll; a slower server is not polled again."""


class _Worker(Struct):
    id: WorkerId
    role: Role
    running: int
    waiting: int


class _Cluster(Struct):
    workers: list[_Worker]


@dataclass(slots=True)
class WorkerWatch:
    """Polls `/cluster`. `timeline` stays empty if the server does not have that path."""

    client: Client
    timeline: Timeline = field(default_factory=Timeline)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Poll until `ended` is set, then once more. Stop early at an answer that does not come from a Baton server."""
        while await self.poll():
            try:
                async with asyncio.timeout(POLL_S):
                    await self.ended.wait()
            except TimeoutError:
                continue
            await self.poll()
            return

    async def poll(self) -> bool:
        """Poll once. Return False if there is no usable answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                response = await self.client.get_at_root("/cluster")
            cluster = msgspec.json.decode(response.body, type=_Cluster)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
            return False
        self._note(cluster, now_s())
        return True

    def _note(self, cluster: _Cluster, moment_s: float) -> None:
        timeline = self.timeline
        timeline.start_s = moment_s if timeline.start_s is None else timeline.start_s
        timeline.end_s = moment_s
        for worker in cluster.workers:
            line = timeline.line(worker.id)
            if not line.roles or line.roles[-1].end_s is not None or line.roles[-1].role != worker.role:
                line.enter(moment_s, worker.role)
            line.report(
                moment_s,
                WorkerView(
                    id=worker.id,
                    host=HostId(""),
                    role=worker.role,
                    running_requests=worker.running,
                    waiting_requests=worker.waiting,
                ),
            )
        gone = set(timeline.workers) - {worker.id for worker in cluster.workers}
        for name in sorted(gone):
            line = timeline.line(name)
            if line.roles[-1].end_s is None:
                line.record_death(moment_s)
