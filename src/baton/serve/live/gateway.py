"""The gateway: the cluster's operations for the HTTP routes. The driver carries them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.compute.models.card import ModelCard
from baton.core.errors import RequestError
from baton.core.leaving import RestartWanted
from baton.core.ticking import ScaleWanted
from baton.core.types import Request, RequestId, Role, Slo, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.tier import Tier
from baton.decide.kv.tiers import Tiers
from baton.move.clock import now_s
from baton.serve.host.worker_link import WorkerLink
from baton.serve.live.driver import Driver
from baton.serve.live.live_request import Finish, LiveRequest
from baton.serve.live.status import ClusterStatus, HostStatus, TierStatus, WorkerStatus

SERVING_STATES = ("loading", "ready", "deserted")
"""States of a server that neither shuts down nor has failed."""


class FleetControl:
    """Changes the fleet as an operator asks."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def restart(self, workers: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
        """Begin a rolling restart of these workers, or of all if none is named. Return the workers still to restart.

        Raises RequestError (404) for an unknown worker.
        """
        for worker in workers:
            self._link(worker)
        ready = [worker for worker, link in self._driver.links.items() if link.state == "ready"]
        self._driver.tell(RestartWanted(tuple(workers or ready)))
        return self._driver.cluster.coordinator.moves.rolling.workers

    def scale(self, role: Role, workers: int | None) -> Mapping[Role, int]:
        """Set the number of workers of a role, or leave it to the policy with None. Return all such numbers."""
        self._driver.tell(ScaleWanted(role, workers))
        return self._driver.cluster.coordinator.reshaping.pinned

    def set_role(self, worker: WorkerId, role: Role) -> None:
        """Change a worker's role from the next request on. Raises RequestError (404) for an unknown worker."""
        link = self._link(worker)
        if link.view.role != role:
            self._driver.set_role(link, role)

    def _link(self, worker: WorkerId) -> WorkerLink:
        link = self._driver.links.get(worker)
        if link is None:
            known = ", ".join(sorted(self._driver.links)) or "none"
            raise RequestError(f"there is no worker {worker[:80]!r}; known: {known}", param="id", status=404)
        return link


class LiveGateway:
    """Submits and cancels requests, and reports the state of the cluster."""

    def __init__(self, card: ModelCard, driver: Driver, *, policy_names: dict[str, str], slo: Slo | None) -> None:
        self.card = card
        self.state = "loading"
        """`loading`, `ready`, `deserted` (all joined hosts are lost), `stopping`, or `failed: <reason>`."""
        self._driver = driver
        self.fleet = FleetControl(driver)
        self.live: Mapping[RequestId, LiveRequest] = driver.live
        """Requests that have not ended, in the order of their arrival."""
        self.decision_log = driver.log
        """The writer of the decision log. None: there is no log."""
        self._policy_names = policy_names
        self.slo = slo
        """Default SLO of clients' requests that set none. None: there is no default."""
        self.addresses: dict[str, str] = {}
        """Address of each host's mover, from which other hosts pull KV blocks."""
        self.request_tokens_max = card.context_tokens
        """Maximum tokens of a request: the smaller of the model's context and the KV cache of one host."""
        self.limit_requests()

    def limit_requests(self) -> None:
        """Limit the length of requests to what every host can hold, because a request may be sent to any of them.

        Does nothing once the server is ready, because clients have seen the limit. Hosts that join later must have
        enough KV blocks for it.
        """
        if self.state == "loading":
            rooms = [pool.request_tokens_max for pool in self._driver.pools.values()]
            known = [room_tokens for room_tokens in rooms if room_tokens is not None]
            self.request_tokens_max = min([self.card.context_tokens, *known])

    def submit(self, request: Request, prompt: Sequence[int]) -> LiveRequest:
        """Start a request whose limits were checked. A rejection becomes the request's `finish`, not an exception."""
        if self.state == "stopping":
            why = "the server is shutting down; send the request again to another one, or later"
            live = LiveRequest(request, prompt)
            finish = Finish(outcome="rejected", reject="shutdown", message=why, retry_after_s=1.0)
            live.close(finish)
            self._driver.recorder.closed(live, finish)
            return live
        return self._driver.submit(request, prompt)

    def finish(self, live: LiveRequest) -> None:
        """End a request as finished: the client has all the text it asked for. Idempotent."""
        live.stopped = True
        self._driver.cancel(live)

    def cancel(self, live: LiveRequest) -> None:
        """End a request as cancelled: the client hung up. Does nothing if it has ended."""
        self._driver.cancel(live)

    def mark_sent(self, live: LiveRequest, tokens: int) -> None:
        """Record that the text of `tokens` more tokens reached the client's socket, which TTFT and TPOT measure."""
        self._driver.recorder.sent(live, tokens, now_s())

    def cluster(self) -> ClusterStatus:
        """Return the body of `/cluster`."""
        links = list(self._driver.links.values())
        hosts = [self._host_status(pool) for pool in self._driver.pools.values()]
        return ClusterStatus(
            workers=tuple(self._status(link) for link in links),
            hosts=tuple(hosts),
            policy=self._policy_names,
            restarting=self._driver.cluster.coordinator.moves.rolling.workers,
            targets=dict(self._driver.cluster.coordinator.reshaping.targets),
        )

    def _host_status(self, pool: HostPool) -> HostStatus:
        view, layout = pool.view(), self._driver.layouts[pool.host]
        links = [link for link in self._driver.links.values() if link.view.host == view.id]
        is_ready = any(link.state == "ready" for link in links)
        return HostStatus(
            id=view.id,
            address=self.addresses.get(view.id, ""),
            state="ready" if is_ready else "starting",
            workers=tuple(link.view.id for link in links),
            kv_blocks_total=view.blocks_total,
            kv_blocks_free=view.blocks_free,
            kv_blocks_used=view.blocks_used,
            kv_blocks_cached=view.blocks_cached,
            kv_block_tokens=layout.block_tokens,
            kv_block_bytes=layout.block_bytes,
            tiers=_tier_statuses(pool.tiers) if pool.tiers is not None else (),
        )

    def _status(self, link: WorkerLink) -> WorkerStatus:
        view = link.view
        pool = self._driver.pools.get(view.host)
        return WorkerStatus(
            id=view.id,
            role=view.role,
            role_reason=self._driver.role_reasons.get(view.id, ""),
            pid=link.pid,
            attention_backend=link.attention_backend,
            host=view.host,
            state=link.state,
            running=view.running_requests,
            waiting=view.waiting_requests,
            kv_blocks_used=pool.blocks_of(view.id) if pool is not None else 0,
            kv_blocks_total=pool.view().blocks_total if pool is not None else 0,
        )

    # ---- shutdown

    async def stop(self) -> None:
        """Refuse requests from now on. Returns once no request is live any more."""
        self.state = "stopping"
        await self._driver.quiet.wait()

    def cancel_all(self) -> None:
        for live in list(self._driver.live.values()):
            self.cancel(live)


def _tier_statuses(tiers: Tiers) -> tuple[TierStatus, ...]:
    return tuple(_tier_status(tier, rests=tier.name in tiers.resting) for tier in tiers.tiers)


def _tier_status(tier: Tier, *, rests: bool) -> TierStatus:
    view = tier.view()
    return TierStatus(
        name=view.tier,
        state="left alone" if rests else "used",
        kv_blocks_total=view.blocks_total,
        kv_blocks_cached=view.blocks_cached,
        kv_blocks_writing=view.blocks_writing,
        loaded_blocks=view.loaded_blocks,
        missed_blocks=view.missed_blocks,
        latency_s=tier.speed.latency_s,
        block_load_s=tier.speed.block_s,
        is_measured=tier.speed.is_measured,
    )
