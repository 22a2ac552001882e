"""Load policies and hooks by name: a built-in policy by its short name, a user's own class as `module:Class`.

A short name does not depend on the module in which a policy lies, so moving a module breaks no user's file. Policies
under `baton.lab` reproduce published systems. They are imported only when a configuration names them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from baton.core.errors import ConfigError
from baton.core.validation import did_you_mean, nearest

_DECIDE = "baton.decide.policy"
_LAB = "baton.lab.policies"

BUILT_IN: dict[str, str] = {
    "slo-headroom": f"{_DECIDE}.slo_headroom:SloHeadroom",
    "bounded-queue": f"{_DECIDE}.admission:BoundedQueue",
    "admit-all": f"{_DECIDE}.admission:AdmitAll",
    "earliest-first-token": f"{_DECIDE}.routing:EarliestFirstToken",
    "fastest-step": f"{_DECIDE}.placement:FastestStep",
    "slo-order": f"{_DECIDE}.fairness:SloOrder",
    "fcfs": f"{_DECIDE}.fairness:FirstComeFirstServed",
    "vtc": f"{_DECIDE}.vtc:VirtualTokenCounter",
    "mixed-chunked": f"{_DECIDE}.batching:MixedChunked",
    "prefill-first": f"{_DECIDE}.batching:PrefillFirst",
    "static-batching": f"{_DECIDE}.batching:StaticBatching",
    "slo-chunked": f"{_DECIDE}.batching:SloChunked",
    "lru": f"{_DECIDE}.eviction:LeastRecentlyUsed",
    "lfu": f"{_DECIDE}.eviction:LeastFrequentlyUsed",
    "cost-aware": f"{_DECIDE}.eviction:CostAware",
    "tenant-quota": f"{_DECIDE}.quota:TenantQuota",
    "static-roles": f"{_DECIDE}.fleet:StaticRoles",
    "demand-roles": f"{_DECIDE}.demand_roles:DemandRoles",
    "fixed-fleet": f"{_DECIDE}.fleet:FixedFleet",
    "forecast-scaling": f"{_DECIDE}.demand:ForecastScaling",
    "recent-demand": f"{_DECIDE}.forecast:RecentDemand",
    "time-of-day": f"{_DECIDE}.forecast:TimeOfDay",
    "arima": f"{_DECIDE}.forecast_series:Arima",
    "exponential-smoothing": f"{_DECIDE}.forecast_series:ExponentialSmoothing",
    "no-moves": f"{_DECIDE}.fleet:NoMoves",
    "recent-mean": f"{_DECIDE}.lengths:RecentMean",
    "when-done": f"{_DECIDE}.streaming:WhenDone",
    "place-at-start": f"{_DECIDE}.streaming:PlaceAtStart",
    "while-computing": f"{_DECIDE}.streaming:WhileComputing",
    "direct-handoff": f"{_DECIDE}.handoff:DirectHandoff",
    "pool-handoff": f"{_DECIDE}.handoff:PoolHandoff",
    "cheapest-handoff": f"{_DECIDE}.handoff:CheapestHandoff",
    "first-token-by-prefill": f"{_DECIDE}.handoff:FirstTokenByPrefill",
    "first-token-by-decode": f"{_DECIDE}.handoff:FirstTokenByDecode",
    "random": f"{_LAB}.baselines:RandomWorker",
    "round-robin": f"{_LAB}.baselines:RoundRobin",
    "least-load": f"{_LAB}.baselines:LeastLoad",
    "shortest-queue": f"{_LAB}.baselines:ShortestQueue",
    "colocated": f"{_LAB}.baselines:Colocated",
    "global-cache-aware": f"{_LAB}.cache_aware:GlobalCacheAware",
    "dynamo-router": f"{_LAB}.cache_aware:DynamoRouter",
    "sglang-router": f"{_LAB}.cache_aware:SglangRouter",
    "llm-d-scorer": f"{_LAB}.cache_aware:LlmdScorer",
    "splitwise-routing": f"{_LAB}.splitwise:SplitwiseRouting",
    "splitwise-placement": f"{_LAB}.splitwise:SplitwisePlacement",
    "tetriinfer-placement": f"{_LAB}.tetriinfer:TetriInferPlacement",
    "tetriinfer-roles": f"{_LAB}.tetriinfer:TetriInferRoles",
    "arrow-routing": f"{_LAB}.arrow:ArrowRouting",
    "arrow-roles": f"{_LAB}.arrow:ArrowRoles",
    "mooncake-rejection": f"{_LAB}.mooncake:PredictedRejection",
    "mooncake-rejection-by-load": f"{_LAB}.mooncake:EarlyRejection",
    "llumnix-routing": f"{_LAB}.llumnix:LlumnixRouting",
    "llumnix-moves": f"{_LAB}.llumnix:LlumnixMoves",
    "conserve-pinning": f"{_LAB}.conversations:ConServe",
    "ampd-routing": f"{_LAB}.conversations:AmpdRouting",
    "pla-routing": f"{_LAB}.pla:PlaRouting",
    "pla-batching": f"{_LAB}.pla:PlaBatching",
}
"""The `module:Class` of each built-in policy, by its short name."""

SHORT_NAMES: dict[str, str] = {spec.partition(":")[2]: name for name, spec in BUILT_IN.items()}
"""The short name of each built-in policy, by its class name."""

RENAMED_CLASSES: dict[str, str] = {
    "LeastPressure": "slo-headroom",
    "PromisesKept": "slo-order",
    "TakeAll": "admit-all",
    "StayPut": "no-moves",
    "AlwaysDirect": "direct-handoff",
    "AlwaysCentral": "pool-handoff",
    "CheapestWay": "cheapest-handoff",
    "ByPrefill": "first-token-by-prefill",
    "ByDecode": "first-token-by-decode",
    "TwoChoices": "tetriinfer-placement",
    "IdleFlip": "tetriinfer-roles",
    "Freest": "llumnix-routing",
    "Rebalance": "llumnix-moves",
}
"""The short name of each built-in policy whose class had another name in earlier versions, for error messages."""

RENAMED_OPTIONS: dict[str, str] = {"ill_s": "avoid_s"}
"""The name of each option of a built-in policy that had another name in earlier versions, for error messages."""


Port = TypeVar("Port")


def load_plugin(spec: str, options: Mapping[str, Any], *, expects: type[Port]) -> Port:
    """Return an instance of a built-in policy (`slo-chunked`) or of a user's `module:Class`, checked against its port.

    `options` are the keyword arguments of the constructor. `expects` is a class or a `runtime_checkable` protocol.
    Raise ConfigError with the problem and the known names.
    """
    return plugin_maker(spec, options, expects=expects)()


def plugin_maker(spec: str, options: Mapping[str, Any], *, expects: type[Port]) -> Callable[[], Port]:
    """Return a function that makes instances of a plug-in. The plug-in and its options are checked once, now."""
    cls = _find_class(spec)
    _check_options(spec, cls, options)

    def make() -> Port:
        try:
            made = cls(**options)
        except (TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"plug-in {spec}: its constructor refused the options {dict(options)}: {error}"
            ) from error
        return check_port(spec, made, expects)

    return make


def source_digests(specs: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the module file of every plug-in that is not built in, in hex.

    Imports of the module are not included, and a module without a file has no digest. Raise ConfigError if a plug-in
    cannot be imported.
    """
    digests: dict[str, str] = {}
    for spec in sorted(set(specs)):
        module_name = spec.partition(":")[0]
        if is_ours(spec):
            continue
        file = _import(spec, module_name).__file__
        if file is not None:
            digests[spec] = sha256(Path(file).read_bytes()).hexdigest()
    return digests


def is_ours(spec: str) -> bool:
    """Return whether a plug-in is a built-in policy."""
    return spec in BUILT_IN


def check_port(spec: str, made: object, expects: type[Port]) -> Port:
    """Return `made` if it implements the port. Raise ConfigError with the missing methods otherwise."""
    if not isinstance(made, expects):
        missing = ", ".join(_missing_methods(made, expects))
        raise ConfigError(f"plug-in {spec} is no {expects.__name__}: it lacks {missing or 'its interface'}")
    return made


def _find_class(spec: str) -> type[Any]:
    module_name, colon, class_name = BUILT_IN.get(spec, spec).partition(":")
    if not colon or not module_name or not class_name:
        raise ConfigError(
            f"plug-in {spec!r}: no built-in policy has this name{did_you_mean(spec, BUILT_IN)}; "
            "write your own as module:Class, for example my_package.my_module:MyPolicy"
        )
    if spec not in BUILT_IN and module_name.startswith("baton."):
        names = RENAMED_CLASSES | SHORT_NAMES
        closest = nearest(class_name, names)
        advice = f"write {names[closest]!r} instead" if closest else f"known: {', '.join(sorted(BUILT_IN))}"
        raise ConfigError(f"plug-in {spec}: built-in policies are named without their module: {advice}")
    module = _import(spec, module_name)
    found = vars(module).get(class_name)
    classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
    if found is None:
        raise ConfigError(f"plug-in {spec}: {module_name} has no {class_name}{did_you_mean(class_name, classes)}")
    if not inspect.isclass(found):
        raise ConfigError(f"plug-in {spec}: {class_name} is no class; name one of {', '.join(sorted(classes))}")
    return found


def _import(spec: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(
                f"plug-in {spec}: no module {missing!r}; is it installed, or its folder on the path?"
            ) from error
        raise ConfigError(f"plug-in {spec}: {module_name} needs the module {missing!r}, which is missing") from error
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"plug-in {spec}: {module_name} cannot be imported: {error}") from error


def _check_options(spec: str, cls: type[Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigError with every unknown and every missing option."""
    parameters = inspect.signature(cls).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    problems = [
        f"plug-in {spec}: unknown option {name!r}{did_you_mean(RENAMED_OPTIONS.get(name, name), known)}"
        for name in options
        if name not in known and not open_ended
    ]
    problems += [
        f"plug-in {spec}: option {p.name!r} is required"
        for p in named
        if p.default is p.empty and p.name not in options
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _missing_methods(made: object, expects: type[Any]) -> list[str]:
    return [name for name in vars(expects) if not name.startswith("_") and not hasattr(made, name)]
