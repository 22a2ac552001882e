"""Workload description in TOML: arrivals, lengths and shared prefixes of requests. Reference: docs/workloads.md."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.core.validation import Count, Factor, Number, Range, Seconds, did_you_mean, out_of_range, type_problems
from baton.lab.workload.amounts import Amount, amount_problems
from baton.lab.workload.arrivals import AllAtOnce, Arrivals, ConstantArrivals

Duration = Annotated[float, Range(above=0.0)]


class SystemPrompts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shared first part of prompts, chosen from a few texts. It gives the prefix cache hits."""

    tokens: Count
    """Length of each text, rounded up to whole blocks of 16 tokens."""
    texts: Count = 1
    """Number of texts, all equally likely."""


class Conversation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-turn requests. Each arrival opens a conversation, and each later turn follows its predecessor's output.

    The next turn comes `think_s` after the output, so the load forms a closed loop.
    """

    turns: Amount = 4.0
    think_s: Amount = 10.0
    """Time between an output and the next turn."""
    followup_tokens: Amount | None = None
    """New tokens of each turn after the first. None: as `input_tokens`."""
    context_tokens: Annotated[int, Range(least=2)] | None = None
    """Bound on prompt and output together. A conversation ends before a turn exceeds it."""


class Tenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of client. Keys left out take the value of the whole file."""

    name: str
    share: Factor = 1.0
    """Weight of this tenant's arrivals relative to the shares of the other tenants."""
    arrivals: Arrivals | None = None
    """Arrival process of this tenant alone, at its own rate. `share` is then ignored."""
    input_tokens: Amount | None = None
    output_tokens: Amount | None = None
    system_prompts: SystemPrompts | None = None
    conversation: Conversation | None = None
    slo: str | None = None
    """Name of a class in `[slo_classes]`."""
    priority: int = 0


class TraceCut(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of a trace file, optionally faster or smoother."""

    file: str
    """Path relative to the workload file, or absolute."""
    start_s: Seconds = 0.0
    duration_s: Duration | None = None
    skip: Number = 0
    """Number of requests to skip after `start_s`."""
    rate_scale: Factor = 1.0
    spread_s: Seconds = 0.0
    """Spread arrivals with equal times over this many seconds. Use 3 for Mooncake's trace, which logs every 3 s."""
    arrivals: Arrivals | None = None
    """Arrival process that replaces the logged times of the section."""


class ServeGen(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests sampled from ServeGen's statistics about each client of a production service."""

    arrivals: str
    """File of rates and variations, one row per client and window of 600 s."""
    lengths: str
    """File of length percentiles, one row per client and window of 6 h."""
    start_s: Seconds = 0.0
    """Start time of the workload within the statistics."""
    duration_s: Duration | None = None
    """Duration of the workload. None: it ends with the statistics, or after `requests`."""
    rate_scale: Factor = 1.0
    """Factor on the request rate of every client. Burstiness stays the same."""


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All keys of a workload file. `requests`, `sessions` or `duration_s` ends the workload."""

    requests: Count | None = None
    sessions: Count | None = None
    """Number of conversations, each with all its turns. Without conversations, number of requests."""
    duration_s: Duration | None = None
    arrivals: Arrivals = ConstantArrivals(1.0)
    input_tokens: Amount = 512.0
    output_tokens: Amount = 128.0
    system_prompts: SystemPrompts | None = None
    conversation: Conversation | None = None
    slo: str | None = None
    slo_classes: dict[str, Slo] = {}
    tenants: tuple[Tenant, ...] = ()
    trace: TraceCut | None = None
    servegen: ServeGen | None = None


_DRAWN = ("sessions", "arrivals", "input_tokens", "output_tokens", "system_prompts", "conversation", "tenants")


def load_workload(text: str) -> Workload:
    """Return the workload of a file's text. Raises ConfigError with every problem, one per line."""
    try:
        raw = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a TOML file: {error}") from error
    found = type_problems(raw, Workload)
    if found:
        raise ConfigError("\n".join(found))
    workload = msgspec.convert(raw, Workload)
    found = _problems(workload, set(raw))
    if found:
        raise ConfigError("\n".join(found))
    return workload


def _problems(workload: Workload, given: set[str]) -> list[str]:
    found = out_of_range(workload) + _source_problems(workload, given) + _length_problems("", workload)
    for number, tenant in enumerate(workload.tenants):
        found += _length_problems(f"tenants[{number}].", tenant)
    names = [tenant.name for tenant in workload.tenants]
    found += [f"two tenants are named {name}" for name in dict.fromkeys(names) if names.count(name) > 1]
    for slo in (workload.slo, *(tenant.slo for tenant in workload.tenants)):
        if slo is not None and slo not in workload.slo_classes:
            known = did_you_mean(slo, workload.slo_classes)
            found.append(f"no class {slo} in [slo_classes]{known}; write [slo_classes.{slo}] with ttft_s and tpot_s")
    return found + [
        f"slo_classes.{name}: ttft_s is {slo.ttft_s:g} and tpot_s is {slo.tpot_s:g}, but both must be above 0"
        for name, slo in workload.slo_classes.items()
        if not (slo.ttft_s > 0 and slo.tpot_s > 0)
    ]


def _source_problems(workload: Workload, given: set[str]) -> list[str]:
    """Return problems with the source of requests and the end of the workload."""
    found: list[str] = []
    if workload.trace is not None and workload.trace.arrivals is not None and workload.trace.spread_s:
        found.append("trace.spread_s and trace.arrivals cannot be given together: both set the arrival times")
    if workload.trace is not None and workload.servegen is not None:
        found.append("[trace] and [servegen] cannot be given together: requests come from one of them")
    source = "trace" if workload.trace is not None else "servegen" if workload.servegen is not None else None
    if source is not None:
        found += [f"{key} cannot be given with [{source}], which has its own" for key in _DRAWN if key in given]
    elif workload.requests is None and workload.sessions is None and workload.duration_s is None:
        found.append("nothing ends the workload: give requests, sessions, duration_s, or several of them")
    elif workload.sessions is None and _all_at_once(workload):
        found += _endless(workload)
    return found


def _endless(workload: Workload) -> list[str]:
    """Return the reason why `at-once` arrivals would never end, as a list of at most one problem."""
    if workload.requests is None:
        return ["all at-once arrivals are at 0 s, so duration_s never ends them: give requests"]
    talks = (workload.conversation, *(tenant.conversation for tenant in workload.tenants))
    if any(talk is not None and talk.think_s != 0 for talk in talks):
        return ["at-once arrivals with think_s start new conversations without end at 0 s: give sessions"]
    return []


def _all_at_once(workload: Workload) -> bool:
    kinds = (workload.arrivals, *(tenant.arrivals for tenant in workload.tenants))
    return any(isinstance(arrivals, AllAtOnce) for arrivals in kinds)


def _length_problems(where: str, lengths: Workload | Tenant) -> list[str]:
    talk = lengths.conversation
    amounts = {"input_tokens": lengths.input_tokens, "output_tokens": lengths.output_tokens}
    if talk is not None:
        amounts |= {"conversation.turns": talk.turns, "conversation.think_s": talk.think_s}
        amounts["conversation.followup_tokens"] = talk.followup_tokens
    named = [(where + name, amount) for name, amount in amounts.items() if amount is not None]
    return [problem for name, amount in named for problem in amount_problems(name, amount)]
