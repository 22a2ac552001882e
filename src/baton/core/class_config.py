"""Service classes and the routes to them: the sections `classes` and `routes` of the configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from msgspec import Struct

from baton.core.keys import NAME, NAME_RULE
from baton.core.validation import Range, Ratio, did_you_mean

CLASSES_MAX = 16
"""Bound on the number of classes: metrics have a label for each."""


class ClassConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service class. Other classes may use its reserve while it is idle, and must give it back."""

    name: str
    priority: Annotated[int, Range(least=-100, most=100)] = 0
    """Lower values are served first."""
    prefill_ratio: Ratio = 0.0
    """Share of each step's tokens that less urgent prompts leave free. Less urgent decodes skip every other step of a
    prompt."""
    decode_ratio: Ratio = 0.0
    """Share of the concurrent requests of decode workers that is reserved."""
    kv_ratio: Ratio = 0.0
    """Share of KV blocks reclaimable from less urgent classes."""
    aging_s: Annotated[float, Range(above=0, most=86400)] = 30.0
    """Waiting time after which the class counts as one `priority` more urgent."""
    ttft_slo_s: Annotated[float, Range(above=0, such_as="seconds, such as 1.0")] | None = None
    """Latency targets of requests without their own: set both or neither."""
    tpot_slo_s: Annotated[float, Range(above=0, such_as="seconds, such as 0.1")] | None = None
    output_tokens_max: Annotated[int, Range(least=0, most=2**31)] = 0
    """Output limit of a request that is deferred (`defer_s`). 0: none."""
    defer_s: Annotated[float, Range(least=0, most=86400)] = 0.0
    """Maximum wait of a request that cannot meet its SLO and is served without one. 0: rejected."""
    copy_tokens: Annotated[int, Range(least=0, most=2**20)] = 0
    """Output tokens after which the new KV blocks of a decode are copied to a shared tier, or else to another host. If
    its host is lost, it continues from the copy. 0: no copies."""


class RouteConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule that gives requests a class. All conditions must hold; the first match counts."""

    service_class: str
    key: str = ""
    """Id of the API key."""
    tenant: str = ""
    model: str = ""
    """The `model` that the request names."""
    path: str = ""
    """Path of the request, such as `/v1/embeddings`."""
    headers: dict[str, str] = {}
    """Headers with their values. A key's limit `classes` names all classes it may use."""


def class_problems(classes: Sequence[ClassConfig], routes: Sequence[RouteConfig], default: str) -> list[str]:
    """Return every problem of the sections `classes` and `routes`."""
    found: list[str] = []
    names = [each.name for each in classes]
    if (surplus := len(names) - CLASSES_MAX) > 0:
        found.append(f"there are {len(names)} classes, at most {CLASSES_MAX} are allowed: remove {surplus}")
    counts = Counter(names)
    found += [f"{count} classes are named {name!r}; rename all but one" for name, count in counts.items() if count > 1]
    for number, each in enumerate(classes):
        if NAME.fullmatch(each.name) is None:
            found.append(f"classes[{number}].name is {each.name[:80]!r}, but {NAME_RULE}")
        if (each.ttft_slo_s is None) != (each.tpot_slo_s is None):
            found.append(f"classes[{number}] needs both ttft_slo_s and tpot_slo_s: a request meets its SLO with both")
    totals = {
        "prefill_ratio": sum(each.prefill_ratio for each in classes),
        "decode_ratio": sum(each.decode_ratio for each in classes),
        "kv_ratio": sum(each.kv_ratio for each in classes),
    }
    found += [
        f"{field} of all classes add up to {total:g}, but must add up to at most 1"
        for field, total in totals.items()
        if total > 1 + 1e-9
    ]
    places = [(f"routes[{number}].service_class", route.service_class) for number, route in enumerate(routes)]
    if default:
        places.append(("default_class", default))
    found += [
        f"{place} is {name!r}, which is no class{did_you_mean(name, names)}; known: {', '.join(names) or 'none'}"
        for place, name in places
        if name not in names
    ]
    return found


def late_targets(classes: Sequence[ClassConfig], ttft_slo_s: float | None, queue_s: float) -> list[str]:
    """Return a problem for each TTFT target above `queue_s`, the longest wait in the queue (0: no limit)."""
    targets = {f"ttft_slo_s of the class {each.name}": each.ttft_slo_s for each in classes} | {"slo.ttft_s": ttft_slo_s}
    return [
        f"{name} is {target_s:g} s, but requests that wait for {queue_s:g} s are rejected: set limits.queue_s to"
        f" {target_s:g} or more, or 0"
        for name, target_s in targets.items()
        if target_s is not None and 0 < queue_s < target_s
    ]
