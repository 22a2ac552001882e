"""The policies that most tests of a coordinator use."""

from __future__ import annotations

from baton.decide.control.advice import Policies
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.admission import BoundedQueue
from baton.decide.policy.fairness import FirstComeFirstServed
from baton.decide.policy.placement import FastestStep
from baton.decide.policy.routing import EarliestFirstToken


def plain_policies() -> Policies:
    """Return the default policies with the linear cost model. `dataclasses.replace` exchanges families."""
    return Policies(
        admission=BoundedQueue(),
        routing=EarliestFirstToken(),
        placement=FastestStep(),
        fairness=FirstComeFirstServed(),
        cost=LinearCost(),
    )
