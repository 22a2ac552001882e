"""Virtual token counters: whoever was served least is served next, and nobody saves up service by staying away.

Source: Fairness in Serving Large Language Models (VTC, OSDI 2024), algorithm 2 and theorem 4.4: while two clients both
have requests waiting, the service that they got differs by at most 2 max(w_p L_input, w_q M), M being the tokens that
fit into memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.types import Request


@dataclass(slots=True, kw_only=True)
class VirtualTokenCounter:
    """Sort waiting requests by what their tenant has been served so far; a tenant's own by arrival."""

    prompt_weight: float = 1.0
    output_weight: float = 2.0
    tenants_max: int = 65_536
    """Most tenants with a counter. Past that, the one that was served least and waits for nothing is forgotten."""
    _served: dict[str, float] = field(default_factory=dict[str, float])
    _waiting: dict[str, int] = field(default_factory=dict[str, int])
    """Waiting requests of each tenant that has any."""
    _last: float = 0.0
    """Counter of the tenant whose last waiting request left last."""
    _version: int = 0

    @property
    def version(self) -> int:
        """See `FairnessPolicy.version`."""
        return self._version

    def counter(self, tenant: str) -> float:
        """Return the weighted tokens that a tenant counts as served."""
        return self._served.get(tenant, 0.0)

    def key(self, request: Request) -> tuple[float, ...]:
        """See `FairnessPolicy.key`."""
        return (float(request.priority), self.counter(request.tenant), request.arrived_at_s)

    def joined(self, request: Request) -> None:
        """See `FairnessPolicy.joined`. Whoever comes back is lifted to where the least served of the waiting is."""
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
        """See `FairnessPolicy.left`."""
        tenant = request.tenant
        count = self._waiting.get(tenant, 0) - 1
        if count > 0:
            self._waiting[tenant] = count
        elif self._waiting.pop(tenant, None) is not None:
            self._last = self.counter(tenant)

    def served(self, request: Request, *, prompt_tokens: int, output_tokens: int) -> None:
        """See `FairnessPolicy.served`."""
        weighted = self.prompt_weight * prompt_tokens + self.output_weight * output_tokens
        self._served[request.tenant] = self.counter(request.tenant) + weighted
        self._version += 1

    def _forget(self) -> None:
        gone = [tenant for tenant in self._served if tenant not in self._waiting]
        if gone:
            del self._served[min(gone, key=lambda tenant: (self._served[tenant], tenant))]
