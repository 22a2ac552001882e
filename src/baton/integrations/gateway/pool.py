"""The servers of a pool: find them, ask them for their health and load, and let those that answer take requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.core.types import Role
from baton.integrations.engines.http import EngineHttp
from baton.integrations.engines.port import EngineBrokenError, EngineGoneError, EngineLoad, EngineRefusedError
from baton.integrations.gateway.picker import Picker
from baton.integrations.vllm.wire import read_load
from baton.move.clock import now_s
from baton.serve.host.tasks import spawn

SERVERS_MAX = 1024
"""Maximum servers of a pool (INV-9)."""
_NAMES = {
    "sglang:num_running_reqs": "vllm:num_requests_running",
    "sglang:num_queue_reqs": "vllm:num_requests_waiting",
    "sglang:token_usage": "vllm:kv_cache_usage_perc",
    "trtllm_num_requests_running": "vllm:num_requests_running",
    "trtllm_num_requests_waiting": "vllm:num_requests_waiting",
    "trtllm_kv_cache_utilization": "vllm:kv_cache_usage_perc",
    "baton_requests_running": "vllm:num_requests_running",
    "baton_requests_waiting": "vllm:num_requests_waiting",
}
"""Metrics of other servers, and those of vLLM with the same meaning."""
_VLLM = "\nvllm:num_requests_running"
"""A server that has it counts the same requests under its own names too."""
_NAME = re.compile("^(" + "|".join(_NAMES) + r")\b", re.MULTILINE)


class PoolSource(Protocol):
    """Says which servers the pool has."""

    async def members(self) -> Mapping[str, Role]:
        """Return the role of each server by its address (`IP:PORT`). Raises EngineBrokenError if it is not known."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPool:
    """A pool whose servers are configured. Implements `PoolSource`."""

    roles: Mapping[str, Role]

    async def members(self) -> Mapping[str, Role]:
        return self.roles


@dataclass(slots=True)
class _Member:
    address: str
    role: Role
    http: EngineHttp
    task: asyncio.Task[None] | None = None
    has_joined: bool = False
    started_unix_s: float = 0.0
    said: str = ""
    """Last problem that was printed."""


class Pool:
    """Keeps the picker's servers those of a source that answer."""

    def __init__(self, source: PoolSource, picker: Picker, tell: Callable[[str], None], *, check_s: float) -> None:
        """`check_s`: interval of checks, in seconds."""
        self.is_known = False
        """The servers were read and asked once."""
        self.key = ""
        """Bearer key for the servers' metrics. Empty: they need none."""
        self.silent_s = 10.0
        """A server without an answer for this long is lost."""
        self._source = source
        self._picker = picker
        self._tell = tell
        self._check_s = check_s
        self._members: dict[str, _Member] = {}

    async def run(self) -> None:
        """Follow the source until it is cancelled."""
        said = ""
        try:
            while True:
                try:
                    problem = await self._follow(await self._source.members())
                except EngineBrokenError as error:
                    problem = str(error)
                if problem and problem != said:
                    self._tell(problem)
                said = problem
                await asyncio.sleep(self._check_s)
        finally:
            for address in list(self._members):
                await self._remove(address)

    async def _follow(self, roles: Mapping[str, Role]) -> str:
        """Take the present servers of the source. Return the reason why some are left out. Empty: none is."""
        kept = dict(list(roles.items())[:SERVERS_MAX])
        for address, member in list(self._members.items()):
            if kept.get(address) != member.role:
                await self._remove(address)
        for address, role in kept.items():
            if address not in self._members:
                http = EngineHttp(f"http://{address}", self.key, answer_s=self.silent_s / 2)
                self._members[address] = _Member(address, role, http)
        fresh = [member for member in self._members.values() if member.task is None]
        await asyncio.gather(*(self._ask(member) for member in fresh))
        for member in fresh:
            member.task = spawn(self._watch(member), self._tell)
        self.is_known = True
        return f"the pool has {len(roles)} servers, at most {SERVERS_MAX} are used" if len(kept) < len(roles) else ""

    async def _remove(self, address: str) -> None:
        member = self._members.pop(address)
        if member.task is not None:
            member.task.cancel()
        if member.has_joined:
            self._picker.lose(address, "the server is not in the pool any more")
        await member.http.close()

    async def _watch(self, member: _Member) -> None:
        answered_s = now_s()
        while True:
            await self._pause(member)
            problem = await self._ask(member)
            if not problem:
                answered_s = now_s()
            elif member.has_joined and now_s() - answered_s >= self.silent_s:
                self._lose(member, f"it has not answered for {self.silent_s:g} s: {problem}")

    async def _pause(self, member: _Member) -> None:
        """Wait for the next check: until requests to the server fail, but not longer than the interval."""
        if not member.has_joined:
            await asyncio.sleep(self._check_s)
            return
        suspected = self._picker.endpoints[member.address].suspected
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(suspected.wait(), self._check_s)
        suspected.clear()

    async def _ask(self, member: _Member) -> str:
        """Read a server's health and load, and let it join if it is well. Return the problem. Empty: there is none."""
        try:
            load = await self._read(member.http)
        except EngineGoneError as error:
            return self._lose(member, f"no process listens there: {error}")
        except EngineRefusedError as error:
            return self._lose(member, str(error))
        except EngineBrokenError as error:
            return str(error) if member.has_joined else self._lose(member, str(error))
        if member.has_joined and load.started_unix_s != member.started_unix_s:
            self._lose(member, "it was restarted, so its KV cache is empty")
        if member.has_joined:
            self._picker.report(member.address, load)
            return ""
        member.has_joined, member.said, member.started_unix_s = True, "", load.started_unix_s
        self._tell(f"{member.address} takes requests as {member.role}")
        self._picker.join(member.address, member.role, load)
        return ""

    def _lose(self, member: _Member, reason: str) -> str:
        if member.has_joined:
            self._picker.lose(member.address, reason)
        if member.has_joined or reason != member.said:
            self._tell(f"{member.address} takes no requests: {reason}")
        member.has_joined, member.said = False, reason
        return reason

    async def _read(self, http: EngineHttp) -> EngineLoad:
        async with http.raw("/health", None, http.short) as response:
            if response.status not in (200, 404):
                raise EngineRefusedError(f"/health answered {response.status}")
        async with http.request("/metrics", limits=http.short) as response:
            text = (await response.read()).decode(errors="replace")
        return read_load(text if _VLLM in text else _NAME.sub(lambda match: _NAMES[match[1]], text))
