"""Calls of the policies, which may be user-defined: an exception in a policy fails one request, not the cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from baton.core.handoff_paths import HandoffPath, HandoffView
from baton.core.messages import CloseRequest
from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, Until, WorkerId, WorkerView
from baton.decide.policy.admission import AdmissionPolicy
from baton.decide.policy.demand_roles import WORKERS_MIN, DemandRoles
from baton.decide.policy.fairness import FairnessPolicy
from baton.decide.policy.fleet import FixedFleet, MovesPolicy, NoMoves, RolesPolicy, ScalingPolicy, StaticRoles
from baton.decide.policy.handoff import (
    DirectHandoff,
    FirstTokenByPrefill,
    FirstTokenPolicy,
    FirstTokenWorker,
    HandoffPolicy,
)
from baton.decide.policy.lengths import LengthsPolicy, RecentMean
from baton.decide.policy.placement import PlacementPolicy
from baton.decide.policy.routing import Route, RoutingPolicy
from baton.decide.policy.streaming import StreamingPolicy, WhenDone

Answer = TypeVar("Answer")
_ID = attrgetter("id")


@dataclass(frozen=True, slots=True)
class PolicyFailure:
    """A policy raised an error, or chose an unknown worker."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The policies of a coordinator, one per family. Every method returns a valid choice or a failure."""

    admission: AdmissionPolicy
    routing: RoutingPolicy
    placement: PlacementPolicy
    fairness: FairnessPolicy
    cost: CostModel
    roles: RolesPolicy = field(default_factory=StaticRoles)
    scaling: ScalingPolicy = field(default_factory=FixedFleet)
    moves: MovesPolicy = field(default_factory=NoMoves)
    lengths: LengthsPolicy = field(default_factory=RecentMean)
    streaming: StreamingPolicy = field(default_factory=WhenDone)
    handoff: HandoffPolicy = field(default_factory=DirectHandoff)
    first_token: FirstTokenPolicy = field(default_factory=FirstTokenByPrefill)

    def admit(self, request: Request, cluster: ClusterView, now_s: float) -> tuple[float, ...] | CloseRequest:
        """Return the request's sort key among waiting requests if it is admitted, else the command that closes it."""
        try:
            rejected = self.admission.admit(request, cluster, self.cost, now_s)
            if rejected is None:
                return tuple(map(float, self.fairness.key(request)))
            return CloseRequest(request.id, "rejected", rejected.reason, rejected.reject, rejected.retry_after_s)
        except Exception as error:  # noqa: BLE001  a user's policy may raise anything
            names = f"{type(self.admission).__name__} or {type(self.fairness).__name__}"
            return CloseRequest(request.id, "failed", f"the policy {names} failed: {type(error).__name__}: {error}")

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView) -> Route | PolicyFailure:
        """Choose the worker that computes the prompt."""
        try:
            choice = self.routing.route(request, candidates, cluster, self.cost)
        except Exception as error:  # noqa: BLE001  see `admit`
            return _failure(self.routing, error)
        route = choice if isinstance(choice, Route) else Route(worker=choice)
        return _unknown(self.routing, route.worker, candidates, cluster) or route

    def place(
        self, request: Request, source: HostId | None, candidates: Sequence[WorkerView], cluster: ClusterView
    ) -> WorkerId | PolicyFailure:
        """Choose the worker that decodes the request."""
        try:
            worker = self.placement.place(request, source, candidates, cluster, self.cost)
        except Exception as error:  # noqa: BLE001  see `admit`
            return _failure(self.placement, error)
        return _unknown(self.placement, worker, candidates, cluster) or worker

    def run_tokens(self, request: Request) -> int:
        """Return the tokens per run in which the prompt's KV is sent ahead. 0: it is not, or the policy failed."""
        try:
            return int(self.streaming.run_tokens(request, self.cost))
        except Exception:  # noqa: BLE001  see `admit`
            return 0

    def layer_groups(self, request: Request, worker: WorkerView) -> int:
        """Return the number of layer groups in which the last chunk is sent ahead; 1 if the policy fails."""
        step_tokens = worker.step_tokens_max or request.prompt_tokens
        chunk_tokens = (request.prompt_tokens - 1) % step_tokens + 1  # assumes that no other prompt shares the steps
        try:
            return max(1, int(self.streaming.layer_groups(request, chunk_tokens, self.cost.on(worker.kind))))
        except Exception:  # noqa: BLE001  see `admit`
            return 1

    def choose_path(self, handoff: HandoffView) -> HandoffPath:
        """Choose the path of a request's KV to another host; `direct` if the policy fails."""
        try:
            return "central" if self.handoff.choose_path(handoff) == "central" else "direct"
        except Exception:  # noqa: BLE001  see `admit`
            return "direct"

    def until(self, request: Request, until: Until) -> Until:
        """Return how far the worker runs the request: `prompt` replaces `first_token` if decode samples that token."""
        return "prompt" if until == "first_token" and self.first_token_by(request) == "decode" else until

    def first_token_by(self, request: Request) -> FirstTokenWorker:
        """Choose the worker that samples the first token.

        It is the prefill worker if the policy fails, for a prompt of one token, and for requests with prompt log
        probabilities or an embedding.
        """
        if request.prompt_tokens == 1 or request.sampling.prompt_logprobs or request.sampling.embedding:
            return "prefill"
        try:
            return "decode" if self.first_token.first_token_by(request, self.cost) == "decode" else "prefill"
        except Exception:  # noqa: BLE001  see `admit`
            return "prefill"

    def learn(self, request: Request, output_tokens: int) -> None:
        """Pass a finished answer to the prediction of output lengths. A failure of the policy is ignored."""
        try:
            self.lengths.finished(request, output_tokens)
        except Exception:  # noqa: BLE001  see `admit`
            return

    def expected_tokens(self, request: Request) -> float:
        """Return the predicted length of the answer; 0 if nothing is known or the policy fails."""
        try:
            return float(self.lengths.expected_tokens(request))
        except Exception:  # noqa: BLE001  see `admit`
            return 0.0


def need_ticks(policies: Policies, workers: int) -> bool:
    """Return whether the policies for roles, scaling and moves can have an effect on this number of workers."""
    if not (isinstance(policies.scaling, FixedFleet) and isinstance(policies.moves, NoMoves)):
        return True
    if isinstance(policies.roles, DemandRoles):
        return workers >= WORKERS_MIN
    return not isinstance(policies.roles, StaticRoles)


def asked(policy: object, ask: Callable[[], Answer]) -> Answer | PolicyFailure:
    """Call a policy of the fleet. An exception becomes a PolicyFailure, and the fleet stays unchanged."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001  see `Policies.admit`
        return _failure(policy, error)


def _failure(policy: object, error: Exception) -> PolicyFailure:
    return PolicyFailure(f"the policy {type(policy).__name__} failed: {type(error).__name__}: {error}")


def _unknown(
    policy: object, worker: WorkerId, candidates: Sequence[WorkerView], cluster: ClusterView
) -> PolicyFailure | None:
    """Return a failure if the chosen worker is not live. Candidates are searched first: they usually match."""
    if worker in map(_ID, chain(candidates, cluster.workers)):
        return None
    known = ", ".join(view.id for view in cluster.workers)
    return PolicyFailure(
        f"the policy {type(policy).__name__} chose {worker!r}, which is not among the workers: {known}"
    )
