"""Check the grammars of requests in sandboxes, before the requests start."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.sandbox.messages import GrammarChecks, GrammarProblem, SandboxSetup
from baton.compute.sandbox.process import SandboxError, SandboxPool
from baton.core.config import SandboxConfig
from baton.serve.http.wire.constraint import Constraint
from baton.serve.http.wire.errors import ClusterError

KNOWN_MAX = 1024
"""Maximum number of remembered results. The least recently used result is dropped first."""
CLIENT_SHARE = 4
"""Each client may fill 1 / `CLIENT_SHARE` of the queue."""
RETRY_AFTER_S = 1.0
WARM_UP_DELAY_S = 2.0
"""Seconds that `warm_up` waits, so that the first requests of a new server have all cores."""
_CLOSED = SandboxError("the model is being unloaded; send it again", is_lasting=False)
_Waiting = tuple[bytes, bytes, "asyncio.Future[GrammarProblem | None]"]


class GrammarChecker:
    """Checks grammars in sandboxes, for one client after the other, and remembers the results. Not thread-safe."""

    def __init__(self, card: ModelCard, limits: SandboxConfig) -> None:
        """Start no process: the sandboxes start with the first grammar, or with `warm_up`."""
        self._card = card
        self._size = limits.processes
        self._waiting_max = limits.waiting_max
        self._pool = SandboxPool(SandboxSetup(GrammarChecks(card), limits), limits.processes)
        self._threads = ThreadPoolExecutor(limits.processes, thread_name_prefix="grammar-check")
        self._known: OrderedDict[bytes, GrammarProblem | None] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[GrammarProblem | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """Waiting jobs of each client. The first client in the dictionary is next."""
        self._is_closed = False

    async def warm_up(self, delay_s: float = WARM_UP_DELAY_S) -> None:
        """Start a sandbox after `delay_s` seconds, so that the first grammar does not wait a second for its start."""
        await asyncio.sleep(delay_s)
        if self._is_closed:
            return
        with suppress(SandboxError):  # the first grammar gets the error, or the server is shutting down
            await asyncio.get_running_loop().run_in_executor(self._threads, self._pool.warm_up)

    async def check(self, constraint: Constraint, client: str) -> None:
        """Raise RequestError (400) if no output can follow the constraint, ClusterError if too many checks wait."""
        constraint.check_size(self._card)
        job = msgspec.msgpack.encode([part.grammar for part in (*constraint.parts, constraint)])
        name = blake2b(job, digest_size=16).digest()
        if name in self._known:
            self._known.move_to_end(name)
            problem = self._known[name]
        else:
            problem = await asyncio.shield(self._running.get(name) or self._queue(name, job, client))
        if problem is not None:
            raise constraint.error(problem)

    def close(self) -> None:
        """End the sandboxes. Checks that still run or wait fail."""
        self._is_closed = True
        self._pool.close()
        for name, _, found in (job for jobs in self._waiting.values() for job in jobs):
            del self._running[name]
            found.set_exception(_unchecked(_CLOSED))
        self._waiting.clear()
        self._threads.shutdown(wait=False)  # calls that have not begun still do, and fail at once

    def _queue(self, name: bytes, job: bytes, client: str) -> asyncio.Future[GrammarProblem | None]:
        if self._is_closed:
            raise _unchecked(_CLOSED)
        mine, own_max = self._waiting.get(client, ()), max(1, self._waiting_max // CLIENT_SHARE)
        if len(mine) >= own_max:
            message = (
                f"{len(mine)} grammars of this client wait to be checked, at most {own_max} may: a quarter of"
                " sandbox.waiting_max; send the request again later"
            )
            raise ClusterError(message, status=429, code="grammar_queue_full", retry_after_s=RETRY_AFTER_S)
        total = sum(map(len, self._waiting.values()))
        if total >= self._waiting_max:
            message = (
                f"{total} grammars wait to be checked, at most {self._waiting_max} may (sandbox.waiting_max);"
                " send the request again later"
            )
            raise ClusterError(message, status=503, code="grammar_queue_full", retry_after_s=RETRY_AFTER_S)
        found: asyncio.Future[GrammarProblem | None] = asyncio.get_running_loop().create_future()
        self._running[name] = found
        self._waiting.setdefault(client, deque()).append((name, job, found))
        if len(self._tasks) < self._size:
            task = asyncio.create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return found

    async def _run(self) -> None:
        """Check grammars until none waits. Clients take turns, with one grammar each."""
        while self._waiting:
            client, jobs = self._waiting.popitem(last=False)
            name, job, found = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs
            try:
                answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._pool.call, job)
                problem = msgspec.msgpack.decode(answer, type=GrammarProblem | None)
            except (SandboxError, RuntimeError) as error:  # RuntimeError: the system starts no further thread
                if isinstance(error, RuntimeError) or not error.is_lasting:
                    del self._running[name]
                    found.set_exception(_unchecked(error))
                    continue
                problem = GrammarProblem(-1, str(error), "")
            del self._running[name]
            self._known[name] = problem
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
            found.set_result(problem)


def _unchecked(error: SandboxError | RuntimeError) -> ClusterError:
    message = f"the grammar could not be checked: {error}"
    return ClusterError(message, status=503, code="grammar_check_failed", retry_after_s=RETRY_AFTER_S)
