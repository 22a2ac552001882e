"""The process of an engine server that Baton has started: start it, and start it again when it has ended."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from baton.move.backoff import Backoff
from baton.serve.host.child_process import output_lines

_STARTS_MAX = 3
"""Starts in a row after which a server that never became ready is given up."""
_BACKOFF = Backoff(0.5, 30.0)
_LINES = 20
"""Last lines of output that are shown if a server fails."""

log = logging.getLogger("baton.engines")


class EngineProcess:
    """Keeps one server running until `stop`. The server's processes end with Baton's, even after kill -9."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], *, start_s: float) -> None:
        """`start_s`: deadline of a start in seconds."""
        self.is_ready = False
        """Set once the server takes requests."""
        self.failure = ""
        """Reason why the server is given up. Empty: it is not."""
        self.argv = argv
        self._name = name
        self._environment = {**os.environ, **environment}
        self._start_s = start_s
        self._is_stopping = False
        self._is_late = False
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=_LINES)

    async def keep(self, tell: Callable[[str], None], ended: asyncio.Event) -> None:
        """Run the server until `stop`, or until it is given up. Set `ended` each time its process has ended."""
        failures = 0
        while not self._is_stopping:
            self.is_ready = self._is_late = False
            how = await self._run()
            ended.set()
            if self._is_stopping:
                return
            failures = 0 if self.is_ready else failures + 1
            tell("\n".join((f"{self._name}: its server {how}. Its last lines:", *self._lines)))
            if failures >= _STARTS_MAX:
                self.failure = f"the server of {self._name} {how}, {failures} times before it was ready"
                return
            await asyncio.sleep(_BACKOFF.pause_s(failures or 1))

    @property
    def pid(self) -> int:
        """Process id of the server's keeper. 0: it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    def end(self) -> None:
        """End the server's processes, by SIGTERM and after some seconds by SIGKILL. `keep` then starts it again."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # the keeper reads this end

    async def stop(self) -> None:
        """End the server for good. No process of it is left when this returns."""
        self._is_stopping = True
        self.end()
        if self._process is not None:
            await self._process.wait()

    async def _run(self) -> str:
        """Run the server once. Return how it ended."""
        self._lines.clear()
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "baton.integrations.engines.keeper",
                *self.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # so that Ctrl-C reaches Baton only, which then ends its servers in order
            )
        except OSError as error:  # the system has too little memory, or too many processes or open files
            return f"cannot be started: {error.strerror}"
        if self._is_stopping:
            self.end()
        deadline = asyncio.get_running_loop().call_later(self._start_s, self._check_start)
        await self._relay(process)
        code = await process.wait()
        deadline.cancel()
        if self._is_late:
            return f"was not ready within {self._start_s:g} s (survival.start_s) and was ended"
        return f"ended with code {code}"

    def _check_start(self) -> None:
        if not self.is_ready:
            self._is_late = True
            self.end()

    async def _relay(self, process: asyncio.subprocess.Process) -> None:
        """Log the output, and keep its last lines. An unread pipe would fill up and block the server."""
        assert process.stdout is not None
        async for line in output_lines(process.stdout):
            self._lines.append(line)
            log.info("%s: %s", self._name, line)


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that started processes may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
