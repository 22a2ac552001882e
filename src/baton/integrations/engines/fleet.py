"""The configured servers of other engines: check them periodically, and tell the driver when one joins or is lost.

Each server is a host of the cluster with one worker. The pool of that host mirrors the server's KV cache, so that
routing knows which prefixes the server has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path

import msgspec

from baton.compute.models.tokenizer import Tokenizer, load_tokenizer
from baton.core.config import BatchLimits
from baton.core.engine_config import EngineConfig
from baton.core.messages import StepReport
from baton.core.plugin import load_plugin
from baton.core.types import HostId, RequestId, WorkerId, WorkerView
from baton.decide.control.batcher import Batcher
from baton.decide.control.cluster_messages import HostAdded
from baton.decide.cost.load import load_cost
from baton.decide.policy.batching import BatcherPolicies
from baton.decide.policy.fairness import FairnessPolicy
from baton.decide.policy.policy_sets import policy_of
from baton.integrations.engines.cache_mirror import CacheMirror
from baton.integrations.engines.failing import is_failing
from baton.integrations.engines.handoffs import EngineMover, Handoffs
from baton.integrations.engines.kv_events import KvEvents
from baton.integrations.engines.member import Member, can_serve, client_of
from baton.integrations.engines.pods import EnginePods
from baton.integrations.engines.port import (
    PROBE,
    EngineBrokenError,
    EngineDeadError,
    EngineFacts,
    EngineGoneError,
    EngineRefusedError,
    EngineServer,
)
from baton.integrations.engines.process import EngineProcess
from baton.integrations.engines.worker import FAILED_REQUESTS_MAX, EngineWorker, WholeRequests
from baton.move.clock import now_s
from baton.serve.host.build import batch_limits
from baton.serve.host.tasks import spawn
from baton.serve.live.assembly import Parts

_FAILING = f"{FAILED_REQUESTS_MAX} requests in a row have failed there"


class EngineFleet:
    """Runs servers of other engines as workers. Implements `EngineHosts` and `EngineListener`."""

    def __init__(
        self,
        parts: Parts,
        tell: Callable[[str], None],
        processes: Sequence[EngineProcess] = (),
        pods: EnginePods | None = None,
    ) -> None:
        """`processes`: one per server, in order, if Baton starts them. Empty: the servers run already.

        `pods`: finds the servers in Kubernetes. None: they are configured.
        """
        self._parts = parts
        self._pods = pods
        self._processes = processes
        self._config = parts.config.engines
        self._fairness = policy_of(parts.config, tenants=parts.config.http.tenants()).fairness
        """Read once: the key file may be invalid when a server joins again."""
        self._tell = tell
        self._handoffs = Handoffs()
        self._members: dict[WorkerId, Member] = {}
        self._finding: asyncio.Task[None] | None = None
        """Looks for pods."""
        self._joins = 0
        """Number of times that any server has joined."""
        self._keeping: list[asyncio.Task[None]] = []
        """Run the processes that Baton has started, and read their output until they have ended."""
        self._tokenizer: Tokenizer | None = None
        self._has_joined = asyncio.Event()
        """Set when a server joins, for decode workers that wait for a prefill server."""
        self._changed: Callable[[], None] = lambda: None

    @property
    def joined(self) -> int:
        return sum(member.link is not None for member in self._members.values())

    @property
    def can_serve(self) -> bool:
        return can_serve(member for member in self._members.values() if member.link is not None)

    @property
    def failure(self) -> str:
        failed = [each.failure for each in self._processes if each.failure]
        kept = [each for each in self._members.values() if each.process is None or not each.process.failure]
        return failed[-1] if failed and not can_serve(kept) else ""

    async def start(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._parts.card)
        for config in self._config.servers:
            if config.kv_events:
                self._events(config).close()  # reports a wrong address now
        for number, config in enumerate(self._config.servers):
            self._add(config, self._processes[number] if self._processes else None)
        urls = ", ".join(config.url for config in self._config.servers) or f"pods with {self._config.pods.selector}"
        self._tell(f"{'starting' if self._processes else 'waiting for'} servers at {urls}")
        kept = [(member.process, member) for member in self._members.values() if member.process is not None]
        self._keeping = [spawn(self._keep(process, member), self._tell) for process, member in kept]
        if self._pods is not None:
            self._finding = spawn(self._find(self._pods), self._tell)

    def _add(self, config: EngineConfig, process: EngineProcess | None = None) -> None:
        """Check a server from now on. It gets the first free number, so that numbers stay bounded."""
        taken = {member.host for member in self._members.values()}
        number = next(number for number in count() if HostId(f"engine-{number}") not in taken)
        assert self._tokenizer is not None, "the tokenizer is loaded before the servers are added"
        server = client_of(config, self._config.key, self._tokenizer, answer_s=self._config.silent_s / 2)
        worker, host = WorkerId(f"{config.engine}-{number}"), HostId(f"engine-{number}")
        member = self._members[worker] = Member(config, worker, host, server, process)
        member.watching = spawn(self._watch(member), self._tell)

    async def stop(self) -> None:
        """End all requests to the servers, and the servers that Baton has started. Others keep running."""
        for task in (self._finding, *(member.watching for member in self._members.values())):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(process.stop() for process in self._processes))
        for task in self._keeping:
            task.cancel()
        for member in self._members.values():
            await member.end()

    # ---- reports of workers

    def report(self, report: StepReport) -> None:
        self._parts.driver.apply_report(report)

    def suspect(self, worker: WorkerId, error: EngineBrokenError) -> None:
        for each in self._members.values():
            if each.worker == worker or each.server.is_paired:  # the partner may have failed
                each.suspected.set()

    def note_partner(self, server: EngineServer, *, has_failed: bool) -> None:
        for each in self._members.values():
            if each.server is server and each.link is not None:
                (each.link.note_failure if has_failed else each.link.note_answer)()

    async def partner(self, worker: WorkerId, request_id: RequestId) -> EngineServer | None:
        joined = [each for each in self._members.values() if each.link is not None]
        if self._members[worker].config.role == "prefill":
            bound = self._parts.driver.cluster.coordinator.bound.worker_of(request_id)
            return next((each.server for each in joined if each.worker == bound), None)
        wait_s = self._parts.config.survival.wait_s
        try:
            async with asyncio.timeout(wait_s):
                while (server := self._least_used_prefill()) is None:
                    self._has_joined.clear()
                    await self._has_joined.wait()
        except TimeoutError:
            raise EngineRefusedError(
                f"the prompt must be computed again, but no prefill server joined in {wait_s:g} s (survival.wait_s)"
            ) from None
        return server

    def _least_used_prefill(self) -> EngineServer | None:
        """Return the joined prefill server with the fewest requests. None: none has joined."""
        links = {each.server: each.link for each in self._members.values() if each.config.role == "prefill"}
        joined = {server: link.requests for server, link in links.items() if link is not None}
        return min(joined, key=lambda server: joined[server], default=None)

    # ---- pods

    async def _find(self, pods: EnginePods) -> None:
        """Use the servers of the ready pods until Baton ends. Keep the known ones while Kubernetes does not answer."""
        async with aclosing(pods.listings(self._tell, self._config.check_s)) as listings:
            async for servers in listings:
                await self._take(servers)

    async def _take(self, servers: Sequence[EngineConfig]) -> None:
        """Add new servers, and remove those that are not listed. A server with another role is another one."""
        for worker, member in list(self._members.items()):
            if member.config not in servers:
                self._lose(member, "its pod is deleted or no longer ready")
                del self._members[worker]
                self._parts.driver.links.pop(worker, None)
                await member.end()
        known = [member.config for member in self._members.values()]
        for config in (each for each in servers if each not in known):
            self._add(config)

    # ---- one server

    async def _keep(self, process: EngineProcess, member: Member) -> None:
        await process.keep(self._tell, member.suspected)
        self._changed()

    async def _watch(self, member: Member) -> None:
        """Add a server whenever it can be reached, and remove it whenever it is lost, until Baton ends."""
        while True:
            try:
                facts = await member.server.facts()
                problem = await self._problem(member, facts)
            except (EngineBrokenError, EngineRefusedError) as error:
                problem, facts = str(error), None
            if facts is not None and not problem:
                self._join(member, facts)
                reason = await self._lost(member, facts.load.started_unix_s)
                self._lose(member, reason)
                await member.server.disconnect()
                if reason == _FAILING:
                    await asyncio.sleep(self._config.silent_s)  # it may join again, and would fail as many again
            elif problem != member.said and not (member.process is not None and facts is None):
                self._tell(f"{member.config.url} takes no requests: {problem}")
                member.said = problem
            await asyncio.sleep(self._config.check_s)

    async def _problem(self, member: Member, facts: EngineFacts) -> str:
        """Return the reason why a server cannot join. Empty: it can."""
        gateway, driver = self._parts.gateway, self._parts.driver
        if facts.problem:
            return facts.problem
        if facts.role not in (None, member.config.role):
            role = member.config.role
            return f"it was started for the role {facts.role}, but has the role {role} here: write {facts.role}=URL"
        if driver.copying.has_copy_of(member.host):
            return "a handoff of its last process has not ended yet"
        room_tokens = min(facts.context_tokens or facts.load.kv_tokens, facts.load.kv_tokens)
        if gateway.state != "loading" and room_tokens < gateway.request_tokens_max:
            most = gateway.request_tokens_max
            return f"it takes {room_tokens} tokens, but requests may have {most}; raise {member.server.context_flag}"
        assert self._tokenizer is not None, "the tokenizer is loaded before the servers are checked"
        ours, theirs = self._tokenizer.encode(PROBE, add_special=False), await member.server.tokenize(PROBE)
        if theirs is not None and theirs != ours:
            model = self._parts.config.model
            return f"its tokenizer is not that of {model}: start both with the same model"
        return ""

    def _join(self, member: Member, facts: EngineFacts) -> None:
        parts, driver = self._parts, self._parts.driver
        gateway, layout = parts.gateway, driver.layout
        blocks = facts.load.kv_tokens // layout.block_tokens
        self._joins += 1
        driver.add_host(HostAdded(member.host, blocks, layout, (), 1))
        member.context_tokens = facts.context_tokens
        mover = EngineMover(member.host, self._handoffs, driver.copying)
        driver.copying.add_host(member.host, mover, layout)
        driver.copying.mover_ready(member.host, self._joins, mover.ready(member.config.url))
        gateway.addresses[member.host] = member.config.url
        limits = self._limits(facts)
        view = WorkerView(
            id=member.worker,
            host=member.host,
            role=member.config.role,
            observed_at_s=now_s(),
            kv_tokens_max=facts.load.kv_tokens,
            requests_max=limits.requests_max,
        )
        link = EngineWorker(view, self._batcher(view, limits), member.server, self._handoffs, self)
        member.link = driver.links[member.worker] = link
        if member.process is not None:
            member.process.is_ready = True
        self._limit_requests()
        member.suspected.clear()
        member.said = ""
        driver.join(link)
        self._has_joined.set()
        if member.config.kv_events:
            member.following = spawn(self._follow(member, blocks), self._tell)
        self._tell(
            f"{member.worker} has joined: {member.config.url}, {facts.name}, {member.config.role}, "
            f"KV cache {facts.load.kv_tokens} tokens, {facts.interface}"
        )
        self._changed()

    async def _follow(self, member: Member, blocks: int) -> None:
        """Pass the server's KV events to the cluster, until the server is lost."""
        mirror = CacheMirror(member.host, self._parts.driver.layout.block_tokens, blocks_max=2 * blocks)
        events = self._events(member.config)
        try:
            async with aclosing(events.batches()) as batches:
                async for batch in batches:
                    changed = mirror.apply(batch)
                    if changed is not None:
                        self._parts.driver.tell(changed)
                    if mirror.problem:
                        self._tell(f"{member.worker}: KV events are not used: {mirror.problem}")
                        return
        finally:
            events.close()

    def _events(self, config: EngineConfig) -> KvEvents:
        """Return the subscription to a server's KV events. Raises ConfigError if there can be none."""
        return KvEvents(config.kv_events, config.kv_events_replay, replay_s=self._config.silent_s)

    def _limit_requests(self) -> None:
        """Limit requests to the shortest context of the joined servers, unless clients have seen the limit."""
        gateway = self._parts.gateway
        gateway.limit_requests()
        if gateway.state == "loading":
            known = [member.context_tokens for member in self._members.values() if member.link is not None]
            gateway.request_tokens_max = min([gateway.request_tokens_max, *filter(None, known)])

    def _limits(self, facts: EngineFacts) -> BatchLimits:
        """Return the limits of a server's batcher: no more requests than the server computes at once."""
        limits = batch_limits(self._parts.config)
        most = min(limits.requests_max, facts.requests_max or limits.requests_max)
        return msgspec.structs.replace(limits, requests_max=most)

    def _batcher(self, view: WorkerView, limits: BatchLimits) -> Batcher:
        config, fairness = self._parts.config, self._fairness
        return Batcher(
            view,
            block_tokens=self._parts.driver.layout.block_tokens,
            limits=limits,
            policies=BatcherPolicies(
                batching=WholeRequests(),
                fairness=load_plugin(fairness.use, fairness.options, expects=FairnessPolicy),
                cost=load_cost(config.cost, folder=Path()).cost,
            ),
        )

    async def _lost(self, member: Member, started_unix_s: float) -> str:
        """Wait until the server is lost. Return the reason."""
        answered_s = now_s()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(member.suspected.wait(), self._config.check_s)
            member.suspected.clear()
            if await self._is_failing(member):
                return _FAILING
            try:
                load = await member.server.load()
            except EngineGoneError as error:
                return f"no process listens there: {error}"
            except EngineDeadError as error:
                return str(error)
            except (EngineBrokenError, EngineRefusedError) as error:
                if now_s() - answered_s >= self._config.silent_s:
                    return f"it has not answered for {self._config.silent_s:g} s: {error}"
                continue
            if load.started_unix_s != started_unix_s:
                return "it was restarted, so its KV cache is empty"
            answered_s = now_s()
            self._handoffs.drop_ended(self._parts.driver.live)
            if member.link is not None:
                member.link.note_load(load)

    async def _is_failing(self, member: Member) -> bool:
        if member.link is None or not member.link.is_failing:
            return False
        assert self._tokenizer is not None, "the tokenizer is loaded before the servers are checked"
        tokens = self._tokenizer.encode("Hello", add_special=False)
        return await is_failing(member, self._members.values(), tokens, self._config.silent_s / 2)

    def _lose(self, member: Member, reason: str) -> None:
        """Remove a lost server and its host's pool. Its requests continue on other servers."""
        parts, driver = self._parts, self._parts.driver
        if member.link is None:
            return
        member.link.stop()
        lost, member.link = member.link, None
        if member.following is not None:
            member.following.cancel()
        if member.process is not None and member.process.is_ready:
            member.process.end()
        why = f"{member.worker} at {member.config.url} is lost: {reason}"
        self._tell(why)
        self._handoffs.lose_host(member.host)
        driver.lose_host(member.host, why)
        driver.links[member.worker] = lost
        parts.gateway.addresses.pop(member.host, None)
        self._limit_requests()
        driver.copying.lose_host(member.host, why)
        parts.metrics.forget_host(member.host)
        self._changed()
