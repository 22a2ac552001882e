"""Virtual token counters: serve the tenant with the least service so far. Idle time earns no credit.

Source: Fairness in Serving Large Language Models (VTC, OSDI 2024), algorithm 2 and theorem 4.4; section 4.4 for weights
and predicted lengths. While two tenants both have waiting requests, their service differs by at most
2 max(w_p L_input, w_q M). M is the number of tokens that the requests in progress can have, in the whole fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nsmallest

from baton.core.types import Request, RequestId


@dataclass(slots=True, kw_only=True)
class VirtualTokenCounter:
    """Sort waiting requests by priority, then by the service that their tenant has received, then by arrival."""

    prompt_weight: float = 1.0
    output_weight: float = 2.0
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Share of each tenant, relative to 1 for the others: its service is divided by this number."""
    predicted_ratio: float = 0.0
    """Share of the predicted answer that is charged when a request begins, instead of as it is generated. 0: none. 1:
    the whole answer, so that tenants with long answers do not get a head start."""
    tenants_max: int = 65_536
    """Maximum number of counters. Beyond it, the tenant with the lowest counter and no waiting request is dropped."""
    _served: dict[str, float] = field(default_factory=dict[str, float])
    _waiting: dict[str, int] = field(default_factory=dict[str, int])
    """Number of waiting requests per tenant, without tenants that have none."""
    _prepaid_tokens: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    """Output tokens that were charged and are not generated yet."""
    _last: float = 0.0
    """Counter of the tenant whose waiting requests ran out last."""

    def __post_init__(self) -> None:
        wrong = {tenant: weight for tenant, weight in self.weights.items() if not weight > 0}
        if wrong:
            raise ValueError(f"weights must be above 0, but are {wrong}")

    def counter(self, tenant: str) -> float:
        """Return the weighted tokens that a tenant has received."""
        return self._served.get(tenant, 0.0)

    def key(self, request: Request) -> tuple[float, ...]:
        return (float(request.priority), self.counter(request.tenant), request.arrived_at_s)

    def joined(self, request: Request) -> None:
        # A tenant that returns starts at the lowest counter of the waiting tenants, so idle time earns no credit.
        tenant = request.tenant
        if tenant in self._waiting:
            self._waiting[tenant] += 1
            return
        lift = min((self.counter(other) for other in self._waiting), default=self._last)
        self._served[tenant] = max(self.counter(tenant), lift)
        self._waiting[tenant] = 1
        if len(self._served) > self.tenants_max:
            self._forget()

    def left(self, request: Request) -> None:
        tenant = request.tenant
        count = self._waiting.get(tenant, 0) - 1
        if count > 0:
            self._waiting[tenant] = count
        elif self._waiting.pop(tenant, None) is not None:
            self._last = self.counter(tenant)

    def began(self, request: Request, *, expected_tokens: float) -> None:
        prepaid_tokens = self.predicted_ratio * expected_tokens
        if prepaid_tokens > 0:
            self._prepaid_tokens[request.id] = prepaid_tokens
        self._charge(request, self.prompt_weight * request.prompt_tokens + self.output_weight * prepaid_tokens)

    def served(self, request: Request, *, output_tokens: int) -> None:
        prepaid_tokens = self._prepaid_tokens.get(request.id, 0.0)
        used = min(prepaid_tokens, output_tokens)
        if used:
            self._prepaid_tokens[request.id] = prepaid_tokens - used
        self._charge(request, self.output_weight * (output_tokens - used))

    def ended(self, request: Request) -> None:
        self._charge(request, -self.output_weight * self._prepaid_tokens.pop(request.id, 0.0))

    def _charge(self, request: Request, weighted: float) -> None:
        tenant = request.tenant
        self._served[tenant] = self.counter(tenant) + weighted / self.weights.get(tenant, 1.0)

    def _forget(self) -> None:
        # More than one may be too many: a running request adds the counter of a dropped tenant again.
        idle = [tenant for tenant in self._served if tenant not in self._waiting]
        too_many = len(self._served) - self.tenants_max
        for tenant in nsmallest(too_many, idle, key=lambda tenant: (self._served[tenant], tenant)):
            del self._served[tenant]
