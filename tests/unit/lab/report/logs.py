"""Small logs, written by a real coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.core.config import Plugin, PolicyConfig
from baton.core.messages import (
    CoordinatorEvent,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    RoleSet,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.prefixes import BlocksStored
from baton.core.types import BlockHash, HostId, Request, RequestId, Slo, WorkerId, WorkerView
from baton.decide.control.build import build_coordinator
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.decision_log import Decision
from baton.decide.cost.load import load_cost

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


def fresh() -> Coordinator:
    cost = load_cost(COST, folder=Path()).cost
    return build_coordinator(POLICY, cost=cost, block_tokens=BLOCK_TOKENS, attempts_max=3)


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


FLEET: tuple[tuple[float, CoordinatorEvent], ...] = (
    (10.0, joined(P0, NEAR, "prefill")),
    (10.0, joined(P1, FAR, "prefill")),
    (10.0, joined(D0, NEAR, "decode")),
    (10.0, joined(D1, FAR, "decode")),
)

EVENTS: tuple[tuple[float, CoordinatorEvent], ...] = (
    *FLEET,
    (10.5, BlocksStored(NEAR, HASHES[:90])),
    (11.0, RequestArrived(request("busy", prompt_tokens=200))),
    (
        11.5,
        WorkerReported(
            WorkerView(id=P0, host=NEAR, role="prefill", running_requests=1, queued_tokens=200, observed_at_s=11.5)
        ),
    ),
    (12.0, RequestArrived(request("asked", blocks=90))),  # 360 of its 400 tokens are near, behind a queue of 200
    (12.25, PrefillFinished(RequestId("busy"), 1, P0, 200)),
    (12.75, PrefillFinished(RequestId("asked"), 1, P0, 400)),
    (13.0, RoleSet(P1, "decode")),
    (13.5, WorkerLost(D1, "killed")),
    (13.75, WorkerLost(D0, "killed too")),
    (15.0, RequestFinished(RequestId("asked"), 2, P1, "stop", 46)),
    (15.0, RequestArrived(request("late", slo=Slo(ttft_s=0.001, tpot_s=1.0)))),
)


def log_of(events: Sequence[tuple[float, CoordinatorEvent]] = EVENTS) -> list[Decision]:
    """What a coordinator decides about them."""
    coordinator = fresh()
    return [Decision(now_s, event, tuple(coordinator.handle(event, now_s))) for now_s, event in events]
