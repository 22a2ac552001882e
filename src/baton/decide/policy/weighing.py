"""How a policy weighs candidate workers, as `baton explain` shows it: its predictions, and the terms of its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, WorkerId, WorkerView


class Weighed(Struct, frozen=True, kw_only=True):
    """One worker as a policy weighs it."""

    worker: WorkerId
    wait_s: float = 0.0
    """For a prompt: predicted time until it is computed. For an answer: the predicted handoff time per token."""
    own_s: float = 0.0
    """For a prompt: predicted time of its computation. For an answer: the predicted time per token on this worker."""
    predicted_s: float
    """For a prompt: the predicted TTFT. For an answer: the predicted TPOT."""
    key: tuple[float, ...]
    """Sort key. The policy chooses the lowest."""
    terms: tuple[str, ...]
    """Description of each number in `key` for this worker."""


@runtime_checkable
class WeighsPrompts(Protocol):
    """A routing policy that can show how it compares workers."""

    def weigh_prompt(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> list[Weighed]:
        """Return how `route` weighs every worker of the cluster."""
        ...


@runtime_checkable
class WeighsAnswers(Protocol):
    """A placement policy that can show how it compares workers."""

    def weigh_answer(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> list[Weighed]:
        """Return how `place` weighs every worker of the cluster."""
        ...


def deciding_term(chosen: Weighed, other: Weighed) -> tuple[str, str] | None:
    """Return the first term that differs, of the other worker and of the chosen one. None: the chosen one is not lower.

    Workers whose keys are equal differ by their ids only.
    """
    for own, theirs, own_term, their_term in zip(chosen.key, other.key, chosen.terms, other.terms, strict=True):
        if own != theirs:
            return (their_term, own_term) if own < theirs else None
    return None
