"""The service class of a request: routes by key, tenant, model, path and headers, and the right of a key to a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from baton.core.class_config import ClassConfig, RouteConfig
from baton.core.config import Config
from baton.core.types import ServiceClass, Slo

OFFLINE_PRIORITY = 2**30
"""Priority of the requests of batches, unless they ask for an even lower one."""
OFFLINE_CLASS = "(batches)"
"""Class of the requests of batches, if there are classes. No configured class can have this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFacts:
    """The facts of a request that routes are compared with."""

    key: str = ""
    tenant: str = ""
    model: str = ""
    """The `model` that the request names. Empty: it names none."""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers by their names in lower case."""


@dataclass(frozen=True, slots=True)
class ClassChoice:
    """The class of a request and its latency targets. None: it has none."""

    service: ServiceClass | None = None
    slo: Slo | None = None


@dataclass(frozen=True, slots=True)
class ClassTable:
    """The configured classes, and the routes to them."""

    classes: Sequence[ClassConfig] = ()
    routes: Sequence[RouteConfig] = ()
    default: str = ""
    """Class of requests that no route matches. Empty: they have none, and count as priority 0."""

    @classmethod
    def of(cls, config: Config) -> ClassTable:
        """Return the table of a server's configuration."""
        return cls(config.classes, config.routes, config.default_class)

    def choose(self, facts: RouteFacts) -> ClassChoice:
        """Return the class of the first route that matches, or the default class."""
        name = next((route.service_class for route in self.routes if _matches(route, facts)), self.default)
        found = next((each for each in self.classes if each.name == name), None)
        if found is None:
            return ClassChoice()
        step_ratio, urgent_ttft_s = self._step_limits(found.priority)
        service = ServiceClass(
            name=name,
            priority=found.priority,
            step_ratio=step_ratio,
            urgent_ttft_s=urgent_ttft_s,
            decode_ratio=found.decode_ratio,
            kv_ratio=found.kv_ratio,
            aging_s=found.aging_s,
            output_tokens_max=found.output_tokens_max,
            defer_s=found.defer_s,
            copy_tokens=found.copy_tokens,
        )
        if found.ttft_slo_s is None or found.tpot_slo_s is None:
            return ClassChoice(service)
        return ClassChoice(service, Slo(ttft_s=found.ttft_slo_s, tpot_s=found.tpot_slo_s))

    def offline(self) -> ClassChoice:
        """Return the class of the requests of batches: less urgent than all others, without a reserve or an SLO."""
        if not self.classes:
            return ClassChoice()
        step_ratio, urgent_ttft_s = self._step_limits(OFFLINE_PRIORITY)
        return ClassChoice(
            ServiceClass(
                name=OFFLINE_CLASS, priority=OFFLINE_PRIORITY, step_ratio=step_ratio, urgent_ttft_s=urgent_ttft_s
            )
        )

    def _step_limits(self, priority: int) -> tuple[float, float | None]:
        """Return the share of a step that this priority may fill, and the shortest TTFT SLO of more urgent classes."""
        urgent = [each for each in self.classes if each.priority < priority]
        targets_s = [each.ttft_slo_s for each in urgent if each.ttft_slo_s is not None]
        return 1.0 - sum(each.prefill_ratio for each in urgent), min(targets_s, default=None)

    def is_allowed(self, facts: RouteFacts, allowed: Set[str] | None) -> bool:
        """Return whether a key may use the class that `choose` finds for its request.

        `allowed`: the classes that its limits name. None: the class that the routes choose without headers, and less
        urgent ones.
        """
        service = self.choose(facts).service
        if service is None:
            return True
        if allowed is not None:
            return service.name in allowed
        own = self.choose(replace(facts, headers={})).service
        own_priority = own.priority if own is not None else 0
        return (own is not None and own.name == service.name) or service.priority > own_priority


def _matches(route: RouteConfig, facts: RouteFacts) -> bool:
    given = ((route.key, facts.key), (route.tenant, facts.tenant), (route.model, facts.model), (route.path, facts.path))
    headers = facts.headers
    return all(not wanted or wanted == found for wanted, found in given) and all(
        headers.get(name.lower()) == value for name, value in route.headers.items()
    )
