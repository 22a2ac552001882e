"""A workload as a TOML file: whose requests come when, how long they are and what they share. See docs/workloads.md."""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.core.validation import did_you_mean, type_problems
from baton.lab.workload.amounts import Amount, amount_problems
from baton.lab.workload.arrivals import AllAtOnce, Arrivals, ConstantArrivals, arrivals_problems


class SystemPrompts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts begin with one of a few texts: what a prefix cache lives on."""

    tokens: int
    """Of each text; rounded up to whole blocks of 16."""
    texts: int = 1
    """How many different ones, all as likely."""


class Conversation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arrivals open conversations; each later turn comes `think_s` after the answer before it (a closed loop)."""

    turns: Amount = 4.0
    think_s: Amount = 10.0
    """Between an answer and the next turn."""
    followup_tokens: Amount | None = None
    """New tokens of every turn but the first. None: as `input_tokens`."""
    context_tokens: int | None = None
    """A conversation ends before prompt and answer would be longer than this."""


class Tenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of client. What it does not say is as the file says it for everybody."""

    name: str
    share: float = 1.0
    """Of the arrivals, in relation to the other tenants' shares."""
    arrivals: Arrivals | None = None
    """Its own process, at its own rate; then `share` says nothing."""
    input_tokens: Amount | None = None
    output_tokens: Amount | None = None
    system_prompts: SystemPrompts | None = None
    conversation: Conversation | None = None
    slo: str | None = None
    """Name of a class of `[slo_classes]`."""
    priority: int = 0


class TraceCut(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of a trace file: a part of it, faster, smoother."""

    file: str
    """Beside the workload file, or absolute."""
    start_s: float = 0.0
    duration_s: float | None = None
    skip: int = 0
    """Requests left out after `start_s`."""
    rate_scale: float = 1.0
    spread_s: float = 0.0
    """Arrivals logged at one instant are spread over this many seconds. 3 for Mooncake, which logs every 3 s."""
    arrivals: Arrivals | None = None
    """Drawn times instead of the logged ones, for the requests of the part."""


class ServeGen(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampled from ServeGen's statistics of each client of a production service."""

    arrivals: str
    """File of rates and variations, one row per client and window of 600 s."""
    lengths: str
    """File of length percentiles, one row per client and window of 6 h."""
    start_s: float = 0.0
    """Where in the statistics the workload begins."""
    duration_s: float | None = None
    """None: to the end of the statistics, or until `requests` are drawn."""
    rate_scale: float = 1.0
    """Times as many requests of every client, as bursty as before."""


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a workload file can say. `requests`, `sessions` or `duration_s` ends it."""

    requests: int | None = None
    sessions: int | None = None
    """Conversations that open, each with all its turns; without conversations: requests."""
    duration_s: float | None = None
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
    """Decode and check a workload file's text. Raises ConfigError with every problem that was found, one per line."""
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
    found = _source_problems(workload, given)
    found += arrivals_problems("arrivals", workload.arrivals)
    found += _length_problems("", workload)
    for tenant in workload.tenants:
        where = f"tenants.{tenant.name}."
        if not (tenant.share > 0 and math.isfinite(tenant.share)):
            found.append(f"{where}share is {tenant.share:g}, but must be above 0")
        if tenant.arrivals is not None:
            found += arrivals_problems(f"{where}arrivals", tenant.arrivals)
        found += _length_problems(where, tenant)
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
    """One source, and an end."""
    found = [
        f"{name} is {value:g}, but must be {'at least' if low == 0 else 'above'} 0"
        for name, value, low in _numbers(workload)
        if value is not None and not (value >= 0 and (value > 0 or low == 0) and value < math.inf)
    ]
    if workload.trace is not None and workload.trace.arrivals is not None:
        found += arrivals_problems("trace.arrivals", workload.trace.arrivals)
        if workload.trace.spread_s:
            found.append("trace.spread_s and trace.arrivals cannot be given together: each makes new times")
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
    """What is wrong with arrivals at-once where no number of sessions ends them."""
    if workload.requests is None:
        return ["arrivals at-once never come to duration_s, for all come at 0: give requests"]
    talks = (workload.conversation, *(tenant.conversation for tenant in workload.tenants))
    if any(talk is not None and talk.think_s != 0 for talk in talks):
        return ["arrivals at-once open conversations without end, before anybody has thought: give sessions"]
    return []


def _all_at_once(workload: Workload) -> bool:
    kinds = (workload.arrivals, *(tenant.arrivals for tenant in workload.tenants))
    return any(isinstance(arrivals, AllAtOnce) for arrivals in kinds)


def _numbers(workload: Workload) -> list[tuple[str, float | None, int]]:
    """(name, value, 0 where 0 is allowed, else 1)."""
    trace, servegen = workload.trace, workload.servegen
    numbers: list[tuple[str, float | None, int]] = [
        ("requests", workload.requests, 1),
        ("sessions", workload.sessions, 1),
        ("duration_s", workload.duration_s, 1),
    ]
    if trace is not None:
        numbers += [("trace.start_s", trace.start_s, 0), ("trace.duration_s", trace.duration_s, 1)]
        numbers += [("trace.skip", trace.skip, 0), ("trace.rate_scale", trace.rate_scale, 1)]
        numbers.append(("trace.spread_s", trace.spread_s, 0))
    if servegen is not None:
        numbers += [("servegen.start_s", servegen.start_s, 0), ("servegen.duration_s", servegen.duration_s, 1)]
        numbers.append(("servegen.rate_scale", servegen.rate_scale, 1))
    return numbers


def _length_problems(where: str, lengths: Workload | Tenant) -> list[str]:
    talk, system = lengths.conversation, lengths.system_prompts
    amounts: dict[str, Amount | None] = {
        "input_tokens": lengths.input_tokens,
        "output_tokens": lengths.output_tokens,
    }
    if talk is not None:
        amounts |= {
            "conversation.turns": talk.turns,
            "conversation.think_s": talk.think_s,
            "conversation.followup_tokens": talk.followup_tokens,
        }
    found = [
        problem
        for name, amount in amounts.items()
        if amount is not None
        for problem in amount_problems(where + name, amount)
    ]
    if talk is not None and talk.context_tokens is not None and talk.context_tokens < 2:
        found.append(f"{where}conversation.context_tokens is {talk.context_tokens}, but must be at least 2")
    if system is not None and (system.tokens < 1 or system.texts < 1):
        found.append(
            f"{where}system_prompts: tokens is {system.tokens} and texts is {system.texts}, but both must be at least 1"
        )
    return found
