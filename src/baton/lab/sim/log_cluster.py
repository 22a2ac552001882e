"""Build a simulated cluster from a live server's decision log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.core.config import BatchLimits
from baton.core.errors import ConfigError
from baton.core.messages import RequestArrived, WorkerJoined
from baton.core.types import WorkerId, WorkerView
from baton.decide.control.decision_log import Decision, LogHeader
from baton.lab.sim.spec import ClusterSpec, SimKind, SimKV, SimWorkers


def cluster_of_log(header: LogHeader, decisions: Iterable[Decision]) -> ClusterSpec:
    """Return a cluster of the workers that joined before the first request, with the log's cost model.

    Workers have the roles with which they joined. Later changes (deaths, manual role flips, scaling) are left out, so
    that the simulated policies start from the initial fleet. Raises ConfigError for a log without a worker.
    """
    views, output_tokens = _first_views(decisions)
    if not views:
        raise ConfigError("no worker ever joined in this log: there is no cluster to simulate; give --cluster FILE")
    spec = ClusterSpec(
        kv=SimKV(block_tokens=header.block_tokens),
        window=header.prompts.window,
        preemption=header.prompts.preemption,
        batch=_limits(header, 0, 0),
        workers=tuple(
            SimWorkers(role=view.role, kind=_kind_name(view), host=view.host) for view in sorted(views, key=_place)
        ),
        kinds={_kind_name(view): _kind(view, header) for view in views},
        queue_requests_max=header.policy.admission.options.get("requests_max", ClusterSpec().queue_requests_max),
        queue_s=header.queue_s,
        output_tokens_max=max(output_tokens, 1),
    )
    problems = spec.problems()
    if problems:
        raise ConfigError("\n".join(problems))
    return spec


def _first_views(decisions: Iterable[Decision]) -> tuple[list[WorkerView], int]:
    """Return the first view of each worker, and the largest output limit of any request.

    Workers that joined after the first request count only if no worker joined before it.
    """
    early: dict[WorkerId, WorkerView] = {}
    late: dict[WorkerId, WorkerView] = {}
    arrived, output_tokens = False, 0
    for decision in decisions:
        match decision.event:
            case WorkerJoined(view=view):
                (late if arrived else early).setdefault(view.id, view)
            case RequestArrived(request=request):
                arrived, output_tokens = True, max(output_tokens, request.output_tokens_max)
            case _:
                pass  # names no worker
    return list((early or late).values()), output_tokens


def _place(view: WorkerView) -> tuple[str, str]:
    return (view.host, view.id)


def _kind_name(view: WorkerView) -> str:
    """Return the name of a worker's kind in the simulation: equal limits and an equal kind in the log."""
    return f"{view.kv_tokens_max}-{view.step_tokens_max}-{view.requests_max}-{view.kind}"


def _kind(view: WorkerView, header: LogHeader) -> SimKind:
    blocks = view.kv_tokens_max // header.block_tokens
    return SimKind(
        cost=_cost_of(view.kind, header.cost),
        kv=SimKV(blocks=blocks, block_tokens=header.block_tokens) if blocks else None,
        batch=_limits(header, view.step_tokens_max, view.requests_max),
    )


def _cost_of(kind: str, cost: dict[str, Any]) -> dict[str, Any]:
    """Return the cost section of one kind of worker. In a log, `kinds` has no keys beside it."""
    kinds = cost.get("kinds")
    return kinds.get(kind, next(iter(kinds.values()))) if kinds else cost


def _limits(header: LogHeader, step_tokens_max: int, requests_max: int) -> BatchLimits:
    usual = BatchLimits()
    return BatchLimits(
        step_tokens_max=step_tokens_max or usual.step_tokens_max,
        requests_max=requests_max or usual.requests_max,
        growth_tokens=header.prompts.growth_tokens or usual.growth_tokens,
    )
