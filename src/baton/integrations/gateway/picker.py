"""Pick servers for requests: drive the cluster's state machine with requests and answers that pass through a proxy.

Each server of the pool is a host with one worker. A request is started on it when the proxy gets its address, decodes
when its answer begins, and finishes when its answer ends. The pool of a host mirrors the server's cache: the prompts
that it has answered, as far as its KV cache has room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from baton.core.messages import (
    CloseRequest,
    HostLost,
    PrefillFinished,
    RejectReason,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    SendAhead,
    StartDecode,
    StartPrefill,
    WorkerJoined,
)
from baton.core.prefixes import CachedRun, EngineCacheChanged
from baton.core.ticking import WaitedTooLong
from baton.core.types import Request, RequestId, Role, WorkerId
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import ClusterEvent, HostAdded, WorkerSaid
from baton.decide.control.decision_log import decided
from baton.decide.kv.layout import KVLayout
from baton.integrations.engines.port import EngineLoad
from baton.integrations.gateway.asked import BLOCK_TOKENS
from baton.integrations.gateway.endpoint import Endpoint
from baton.move.clock import now_s
from baton.serve.http.wire.errors import ClusterError
from baton.serve.live.log_thread import LogThread

REQUESTS_MAX = 16_384
"""Maximum requests of a pool at once (INV-9)."""
FALLBACKS = 2
"""Further servers that the proxy gets, for its retries."""
_LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=BLOCK_TOKENS, dtype="uint8")
_STATUS: dict[RejectReason, int] = {"no_worker": 503, "shutdown": 503, "too_long": 400}
"""Status of a refusal. All others are 429, as the endpoint picker protocol says for requests that are shed."""
_NO_SERVER_S = 1.0


@dataclass(slots=True)
class Pick:
    """A request and the servers that were chosen for it."""

    request: Request
    worker: WorkerId | None = None
    """Runs the request now, as the cluster's state machine knows it. None: it waits."""
    attempt: int = 1
    decoder: WorkerId | None = None
    """Server that continues after the prompt. None: the same one."""
    served_by: WorkerId | None = None
    """Server whose address the proxy gets first."""
    new_tokens: int = 0
    """Prompt tokens that the server probably has to compute."""
    predicted_s: float = 0.0
    """Predicted TTFT. 0: there is none."""
    has_begun: bool = False
    is_told: bool = False
    """The proxy has the addresses, so later decisions count for the load only."""
    is_closed: bool = False
    refusal: ClusterError | None = None
    is_decided: bool = False
    _waiting: Callable[[], None] | None = None

    @property
    def prefiller(self) -> WorkerId | None:
        """Server that computes the prompt for the picked one. None: the picked one does."""
        return self.worker if self.decoder not in (None, self.worker) else None

    def when_decided(self, call: Callable[[], None]) -> None:
        """Call a function once servers are chosen or the request is refused; at once if that is so already."""
        if self.is_decided:
            call()
        else:
            self._waiting = call

    def decide(self) -> None:
        """Note that servers are chosen, or that the request is refused."""
        self.is_decided, waiting, self._waiting = True, self._waiting, None
        if waiting is not None:  # later: further decisions of this event may change the servers
            asyncio.get_running_loop().call_soon(waiting)


class Picker:
    """The pool and its requests. All methods run on one event loop, and none waits."""

    def __init__(self, cluster: Cluster, log: LogThread | None = None) -> None:
        """`log`: the decision log. None: there is none."""
        self.endpoints: dict[str, Endpoint] = {}
        """The servers that take requests, by address."""
        self.cluster = cluster
        self._log = log
        self._workers: dict[WorkerId, Endpoint] = {}
        self._picks: dict[RequestId, Pick] = {}

    def close(self) -> None:
        """Write the rest of the decision log."""
        if self._log is not None:
            self._log.close()

    # ---- servers

    def join(self, address: str, role: Role, load: EngineLoad) -> None:
        """Let a server take requests."""
        endpoint = Endpoint(address, role, load)
        self.endpoints[address] = self._workers[endpoint.worker] = endpoint
        self._tell(HostAdded(endpoint.host, endpoint.kv_tokens // BLOCK_TOKENS, _LAYOUT, (), 1))
        self._tell(WorkerJoined(endpoint.view(now_s())))

    def lose(self, address: str, reason: str) -> None:
        """Give a server no further requests."""
        endpoint = self.endpoints.pop(address)
        del self._workers[endpoint.worker]
        self._tell(HostLost(endpoint.host, reason))

    def report(self, address: str, load: EngineLoad) -> None:
        """Take the load that a server's metrics show."""
        endpoint = self.endpoints[address]
        endpoint.note_load(load)
        self._tell(WorkerSaid(endpoint.worker, view=endpoint.view(now_s())))

    # ---- requests

    def arrive(self, request: Request) -> Pick:
        """Choose servers for a request. It is decided at once, unless a fair queue holds the request back."""
        if request.id in self._picks:
            request = replace(request, id=RequestId(f"{request.id}#{len(self._picks)}-{now_s():.6f}"))
        pick = self._picks[request.id] = Pick(request)
        self._tell(RequestArrived(request))
        if not any(endpoint.host in (request.hosts or (endpoint.host,)) for endpoint in self.endpoints.values()):
            self._tell(WaitedTooLong(0.0))
        return pick

    def addresses(self, pick: Pick) -> list[str]:
        """Return the picked server and those for retries, as `IP:PORT`."""
        assert pick.served_by is not None, f"no server was picked for {pick.request.id}"
        pick.is_told = True
        first = self._workers.get(pick.served_by)
        others = [each for each in self._allowed(pick.request) if each is not first and each.role != "prefill"]
        others.sort(key=lambda each: (each.running_requests, each.address))
        return [each.address for each in ([first] if first else []) + others[:FALLBACKS]]

    def prefiller(self, pick: Pick) -> str:
        """Return the address of the server that computes the prompt first. Empty: the picked one does."""
        endpoint = self._workers.get(pick.prefiller) if pick.prefiller is not None else None
        return endpoint.address if endpoint is not None else ""

    def begin(self, pick: Pick, *, is_first_token: bool) -> None:
        """Note that the answer of a request begins. `is_first_token`: the time of its first token is known by it."""
        if pick.has_begun or pick.worker is None:
            return
        pick.has_begun, at_s, computed_by = True, now_s(), pick.worker
        endpoint = self._workers.get(computed_by)
        if endpoint is not None:
            endpoint.begin(pick.request.id)
            if is_first_token and pick.predicted_s:
                endpoint.learn(pick.predicted_s, at_s - pick.request.arrived_at_s)
        for worker in dict.fromkeys((computed_by, pick.decoder or computed_by)):
            self._cache(worker, pick.request)
        if pick.prefiller is not None:
            said = PrefillFinished(pick.request.id, pick.attempt, computed_by, pick.request.prompt_tokens - 1)
            self._say(computed_by, events=(said,))
        self._say(pick.worker, begun=((pick.request.id, pick.attempt),))

    def note_served(self, pick: Pick, address: str) -> None:
        """Note the server that has answered, which is another one than the picked one after a retry."""
        if not address or pick.served_by in (None, address):
            return
        picked, served = self._workers.get(pick.served_by), self.endpoints.get(address)
        if picked is not None:
            picked.suspected.set()
        if served is not None:
            self._cache(served.worker, pick.request)

    def end(self, pick: Pick, *, output_tokens: int, is_complete: bool) -> None:
        """Note that the stream of a request has ended. `is_complete`: its whole answer was sent."""
        if pick.request.id not in self._picks:
            return
        if is_complete:
            self.begin(pick, is_first_token=False)
        if is_complete and pick.worker is not None:
            said = RequestFinished(pick.request.id, pick.attempt, pick.worker, "stop", output_tokens)
            self._say(pick.worker, events=(said,))
        if not pick.is_closed:
            self._tell(RequestCancelled(pick.request.id))
        self._leave(pick)
        del self._picks[pick.request.id]

    def _allowed(self, request: Request) -> list[Endpoint]:
        return [each for each in self.endpoints.values() if not request.hosts or each.host in request.hosts]

    def _cache(self, worker: WorkerId, request: Request) -> None:
        """Add the blocks of a prompt to the mirror of a server's cache."""
        endpoint = self._workers.get(worker)
        if endpoint is not None and request.block_hashes:
            run = CachedRun(None, 0, request.block_hashes)
            self._tell(EngineCacheChanged(endpoint.host, (run,)))

    def _say(
        self,
        worker: WorkerId,
        *,
        begun: tuple[tuple[RequestId, int], ...] = (),
        events: Sequence[PrefillFinished | RequestFinished] = (),
    ) -> None:
        """Report to the cluster as the worker of a server would."""
        endpoint = self._workers.get(worker)
        view = endpoint.view(now_s()) if endpoint is not None else None
        self._tell(WorkerSaid(worker, begun, tuple(events), view))

    def _leave(self, pick: Pick) -> None:
        for worker in (pick.worker, pick.decoder):
            endpoint = self._workers.get(worker) if worker is not None else None
            if endpoint is not None:
                endpoint.leave(pick.request.id)

    # ---- decisions

    def _tell(self, event: ClusterEvent) -> None:
        """Pass an event to the cluster, log the decisions and note those about requests."""
        moment_s = now_s()
        self.cluster.handle(event, moment_s)
        if self._log is not None:
            self._log.append(decided(moment_s, event, self.cluster.decided))
        for command in self.cluster.decided:
            match command:
                case StartPrefill() | StartDecode():
                    self._start(command)
                case SendAhead(request=request, worker=worker) if request.id in self._picks:
                    pick = self._picks[request.id]
                    pick.decoder = worker
                    if not pick.is_told:
                        pick.served_by = worker
                case CloseRequest():
                    self._close(command)
                case _:
                    pass  # commands to workers and pools: the servers have their own

    def _start(self, start: StartPrefill | StartDecode) -> None:
        """Note the worker of a request. The proxy knows the first one; later ones count for the load only."""
        pick = self._picks.get(start.request.id)
        if pick is None:
            return
        self._leave(pick)
        pick.worker, pick.attempt, pick.decoder = start.worker, start.attempt, None
        endpoint = self._workers[start.worker]
        if isinstance(start, StartPrefill):
            held_tokens = self.cluster.pools[endpoint.host].held_tokens(start.request.block_hashes)
            pick.new_tokens = max(1, start.request.prompt_tokens - held_tokens)
            pick.predicted_s = start.predicted.ttft_s if start.predicted is not None else 0.0
            endpoint.start(start.request, pick.new_tokens)
        else:
            endpoint.start(start.request, 0)
        if not pick.is_told:
            pick.served_by = start.worker
        pick.decide()

    def _close(self, close: CloseRequest) -> None:
        pick = self._picks.get(close.request_id)
        if pick is None:
            return
        pick.is_closed = True
        if close.outcome in ("finished", "cancelled"):
            return
        if close.outcome == "rejected" and close.reject is not None:
            status, code = _STATUS.get(close.reject, 429), close.reject
            reason = close.reason or "no server of the pool is ready"
            wait_s = None if status == 400 else (close.retry_after_s or _NO_SERVER_S)
            pick.refusal = ClusterError(reason, status=status, code=code, retry_after_s=wait_s)
        else:
            pick.refusal = ClusterError(close.reason, status=500, code="pick_failed")
        self._leave(pick)
        pick.decide()
