"""Small logs, written by a real cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton.core.config import Plugin, PolicyConfig
from baton.core.messages import (
    BlocksSealed,
    BlocksWanted,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    RoleSet,
    WorkerJoined,
    WorkerLost,
)
from baton.core.types import BlockHash, HostId, Request, RequestId, Slo, WorkerId, WorkerView
from baton.decide.control.build import build_policies
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import ClusterEvent, HostAdded, WorkerSaid
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.decision_log import Decision, decided
from baton.decide.control.host_pools import PoolRules
from baton.decide.cost.load import load_cost
from baton.decide.kv.layout import KVLayout
from baton.decide.policy.eviction import LeastRecentlyUsed
from baton.lab.report.questions import Notes, watched

BLOCK_TOKENS = 4
COST = {"step_overhead_s": 0.04, "prefill_token_s": 0.0025, "decode_request_s": 0.005}
"""Such that a queue of 200 tokens costs half a second."""
POLICY = PolicyConfig(
    admission=Plugin(use="bounded-queue"),
    routing=Plugin(use="earliest-first-token"),
    placement=Plugin(use="fastest-step"),
)
NEAR, FAR = HostId("near"), HostId("far")
P0, P1, D0, D1 = (WorkerId(name) for name in ("p0", "p1", "d0", "d1"))
HASHES = tuple(BlockHash(f"block {index}".encode()) for index in range(100))


def fresh(notes: Notes | None = None, **changed: object) -> Cluster:
    """Make a cluster without workers. `changed`: policies in the place of the usual ones, by family."""
    policies = replace(build_policies(POLICY, load_cost(COST, folder=Path()).cost), **changed)
    coordinator = Coordinator(policies if notes is None else watched(policies, notes), BLOCK_TOKENS)
    return Cluster(coordinator, PoolRules(eviction=LeastRecentlyUsed))


def request(name: str, *, prompt_tokens: int = 400, blocks: int = 0, slo: Slo | None = None) -> Request:
    return Request(
        id=RequestId(name),
        prompt_tokens=prompt_tokens,
        block_hashes=HASHES[:blocks],
        output_tokens_max=50,
        arrived_at_s=0.0,
        slo=slo,
    )


def joined(worker: WorkerId, host: HostId, role: str) -> WorkerJoined:
    return WorkerJoined(WorkerView(id=worker, host=host, role=role))  # type: ignore[arg-type]


LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=4, block_tokens=BLOCK_TOKENS, dtype="float32")
HOSTS: tuple[tuple[float, ClusterEvent], ...] = tuple((10.0, HostAdded(host, 1000, LAYOUT)) for host in (NEAR, FAR))
"""Come before everything else."""
FLEET: tuple[tuple[float, ClusterEvent], ...] = (
    (10.0, joined(P0, NEAR, "prefill")),
    (10.0, joined(P1, FAR, "prefill")),
    (10.0, joined(D0, NEAR, "decode")),
    (10.0, joined(D1, FAR, "decode")),
)


def said(worker: WorkerId, event: BlocksSealed | PrefillFinished | RequestFinished) -> WorkerSaid:
    return WorkerSaid(worker, events=(event,))


BUSY, ASKED = RequestId("busy"), RequestId("asked")
REPORT = WorkerView(id=P0, host=NEAR, role="prefill", running_requests=1, queued_tokens=200, observed_at_s=11.5)
EVENTS: tuple[tuple[float, ClusterEvent], ...] = (
    *FLEET,
    (11.0, RequestArrived(request("busy", prompt_tokens=200))),
    (11.25, WorkerSaid(P0, events=(BlocksWanted(BUSY, 1, P0, 90), BlocksSealed(BUSY, 1, P0, 0, HASHES[:90])))),
    (11.5, WorkerSaid(P0, view=REPORT)),
    (12.0, RequestArrived(request("asked", blocks=90))),  # 360 of its 400 tokens are near, behind a queue of 200
    (12.25, said(P0, PrefillFinished(BUSY, 1, P0, 200))),
    (12.75, said(P0, PrefillFinished(ASKED, 1, P0, 400))),
    (13.0, RoleSet(P1, "decode")),
    (13.5, WorkerLost(D1, "killed")),
    (13.75, WorkerLost(D0, "killed too")),
    (15.0, said(P1, RequestFinished(ASKED, 2, P1, "stop", 46))),
    (15.0, RequestArrived(request("late", slo=Slo(ttft_s=0.001, tpot_s=1.0)))),
)


def log_of(events: Sequence[tuple[float, ClusterEvent]] = EVENTS, **changed: object) -> list[Decision]:
    """Return what a cluster decides about them, after its hosts were added. `changed`: see `fresh`."""
    cluster, log = fresh(**changed), list[Decision]()
    for now_s, event in (*HOSTS, *events):
        cluster.handle(event, now_s)
        log.append(decided(now_s, event, cluster.decided))
    return log
