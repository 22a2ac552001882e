"""What a batcher decides by: policies, the cost of its worker's steps, and how far it guesses ahead."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.config import SpeculationConfig
from baton.core.ports import CostModel
from baton.decide.policy.batching import BatchingPolicy
from baton.decide.policy.fairness import FairnessPolicy

OFF = SpeculationConfig()
"""No guesses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherPolicies:
    batching: BatchingPolicy
    fairness: FairnessPolicy
    cost: CostModel
    """Predicts steps of this worker."""
    speculation: SpeculationConfig = OFF
