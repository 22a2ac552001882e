"""Virtual token counters: serve the tenant with the least service so far. Idle time earns no credit.

Source: Fairness in Serving Large Language Models (VTC, OSDI 2024), algorithm 2 and theorem 4.4. While two clients both
have waiting requests, their service differs by at most 2 max(w_p L_input, w_q M). M is the number of tokens that fit
into memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.types import Request


@dataclass(slots=True, kw_only=True)
class VirtualTokenCounter:
    """Sort waiting requests by priority, then by the service that their tenant has received, then by arrival."""

    prompt_weight: float = 1.0
    output_weight: float = 2.0
    tenants_max: int = 65_536
    """Maximum number of counters. Beyond it, the tenant with the lowest counter and no waiting request is dropped."""
    _served: dict[str, float] = field(default_factory=dict[str, float])
    _waiting: dict[str, int] = field(default_factory=dict[str, int])
    """Number of waiting requests per tenant, without tenants that have none."""
    _last: float = 0.0
    """Counter of the tenant whose waiting requests ran out last."""
    _version: int = 0

    @property
    def version(self) -> int:
        return self._version

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
        self._version += 1
        if len(self._served) > self.tenants_max:
            self._forget()

    def left(self, request: Request) -> None:
        tenant = request.tenant
        count = self._waiting.get(tenant, 0) - 1
        if count > 0:
            self._waiting[tenant] = count
        elif self._waiting.pop(tenant, None) is not None:
            self._last = self.counter(tenant)

    def served(self, request: Request, *, prompt_tokens: int, output_tokens: int) -> None:
        weighted = self.prompt_weight * prompt_tokens + self.output_weight * output_tokens
        self._served[request.tenant] = self.counter(request.tenant) + weighted
        self._version += 1

    def _forget(self) -> None:
        gone = [tenant for tenant in self._served if tenant not in self._waiting]
        if gone:
            del self._served[min(gone, key=lambda tenant: (self._served[tenant], tenant))]
