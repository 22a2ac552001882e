"""A fleet as what Baton runs: a server's configuration, `baton host` for each worker, and what it cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import structs

from baton.core.config import BatchLimits, Config, HostsConfig, KVConfig, ParallelConfig, SloConfig, Topology
from baton.decide.cost.catalog import hub_name, model_shape, models
from baton.lab.plan.cluster import BLOCK_TOKENS, batch_requests_max, cost_section, step_tokens_max
from baton.lab.plan.recommend import Recommendation
from baton.lab.plan.search import PlannedFleet, WorkerGroup

HTTP_PORT, HOSTS_PORT = 8000, 8001
"""Of the server: for clients, and for hosts that have joined."""
SHIPPED = "smollm2-135m"
"""The one model that `baton serve` knows by a name of the catalogue."""
_ALWAYS = ("block_tokens", "step_tokens_max", "requests_max")
"""Keys that are written even where they are the server's defaults: the plan rests on them."""


def served_model(llm: str) -> str:
    """What `baton serve` is told for the model of a plan: a hub name, or the folder of its config.json."""
    if llm.endswith(".json"):
        return str(Path(llm).parent)
    return llm if "/" in llm else hub_name(model_shape(llm).name) or llm


def is_alone(fleet: PlannedFleet) -> bool:
    """Whether the server's own host is enough. Workers of one host share its GPUs, so each has a host of its own."""
    return sum(group.workers for group in fleet.groups) == 1


def serve_config(found: Recommendation) -> Config:
    """The configuration of a server with the plan's only worker, or with none and the hosts that have one each.

    Batch limits hold for all workers of a server: the largest step that a group asks for, and its most requests. The
    SLO is the whole one that was asked for: the server itself takes off what loading from a tier takes.
    """
    slo, groups = found.question.demand.slo, found.best.groups
    config = Config(
        model=served_model(found.question.spec.llm),
        dtype="bfloat16",
        batch=BatchLimits(
            step_tokens_max=max(step_tokens_max(group) for group in groups),
            requests_max=max(batch_requests_max(group) for group in groups),
        ),
        kv=KVConfig(block_tokens=BLOCK_TOKENS),
        slo=SloConfig(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s) if enforces_slo(found) else SloConfig(),
        cost=_prices(found.best),
    )
    return _with_own(config, groups[0]) if is_alone(found.best) else _with_hosts(config, found.best)


def _prices(fleet: PlannedFleet) -> dict[str, Any]:
    """What the plan says of steps, of those who decode where groups differ: a promised TPOT is held against it.

    Else a server without a GPU, whose hosts have them, would refuse everything by the prices of its own CPU.
    """
    group = next((each for each in fleet.groups if each.role != "prefill"), fleet.groups[0])
    return cast("dict[str, Any]", _said(msgspec.to_builtins(cost_section(group, same_host=False))))


def _said(value: object) -> object:
    """Leave out what is none: TOML has no word for it."""
    if not isinstance(value, Mapping):
        return value
    items = cast("Mapping[str, object]", value).items()
    return {key: _said(each) for key, each in items if each is not None}


def _with_own(config: Config, group: WorkerGroup) -> Config:
    parallel, blocks = group.option.cost.parallel, kv_blocks(group)
    return structs.replace(
        config,
        topology=Topology(**{group.role: 1}),
        parallel=ParallelConfig(tensor=parallel.tp, pipeline=parallel.pp),
        kv=KVConfig(block_tokens=BLOCK_TOKENS, blocks=blocks),
    )


def _with_hosts(config: Config, fleet: PlannedFleet) -> Config:
    hosts = sum(group.workers for group in fleet.groups)
    return structs.replace(config, hosts=HostsConfig(expected=hosts, port=HOSTS_PORT))


def kv_blocks(group: WorkerGroup) -> int:
    """Blocks of the arena beside a worker. 0, which leaves it to the host, where formats are not as planned."""
    return 0 if missing_features(group) else group.option.facts.kv_tokens_max // BLOCK_TOKENS


def enforces_slo(found: Recommendation) -> bool:
    """Whether requests are to be promised the SLO: those that would miss it are refused then."""
    return found.admissions[0].admission == "slo" if found.admissions else "slo" in found.question.spec.admission


def host_command(group: WorkerGroup, *, url: str) -> list[str]:
    """The command of a host with one worker of the group."""
    parallel, blocks = group.option.cost.parallel, kv_blocks(group)
    words = ["baton", "host", "--join", url, f"--{group.role}", "1", "--device", "cuda"]
    words += ["--tp", str(parallel.tp), "--pp", str(parallel.pp)]
    return words + (["--kv-blocks", str(blocks)] if blocks else [])


def missing_features(group: WorkerGroup) -> list[str]:
    """What the plan counts on for these workers and Baton's own engine does not have on a GPU."""
    cost = group.option.cost
    found: list[str] = []
    if cost.precision.weights != "bf16":
        found.append(
            f"weights in {cost.precision.weights} (it computes with bfloat16, which takes more memory and time)"
        )
    if cost.precision.kv != "bf16":
        found.append(f"KV in {cost.precision.kv} (it keeps bfloat16, which takes more memory)")
    found += [f"{name} {degree}" for name, degree in (("cp", cost.parallel.cp), ("dp", cost.parallel.dp)) if degree > 1]
    return found


def missing_feature_lines(fleet: PlannedFleet) -> list[str]:
    """The same of a fleet, a line for each group that lacks something."""
    return [
        f"{group.role} on {group.option.name}: Baton's own engine has no {', no '.join(missing)} on a GPU; it does not "
        "reach the planned rate"
        for group in fleet.groups
        for missing in (missing_features(group),)
        if missing
    ]


def serve_toml(found: Recommendation) -> str:
    """The configuration as a file, with what it cannot say in comments: the commands of the hosts."""
    config, fleet = serve_config(found), found.best
    lines = [
        f"# {fleet.name}",
        f"# {fleet.rate_rps:.2f} req/s within the SLO; `baton serve --config FILE`",
        *(f"# {line}" for line in _host_lines(fleet)),
        *(f"# not as planned: {line}" for line in missing_feature_lines(fleet)),
        *(
            f"# with the tier {tier.name}, {tier.size_bytes:.3g} bytes {'for all hosts' if tier.shared else 'a host'}: "
            "add [[tiers]] with its url (docs/handoff-and-tiers.md)"
            for tier in found.question.spec.tiers
            if found.tiers and tier.name == found.tiers[0].tier
        ),
    ]
    if config.model in models() and config.model != SHIPPED:
        lines.append("# no hub name of this model is known: put its hub name, its folder or its .gguf file here")
    lines += [f"model = {_value(config.model)}", f"dtype = {_value(config.dtype)}"]
    plain = Config(model=config.model, dtype=config.dtype)
    for name in ("topology", "parallel", "batch", "kv", "slo", "hosts"):
        section, usual = structs.asdict(config)[name], structs.asdict(plain)[name]
        said, known = structs.asdict(section), structs.asdict(usual)
        keys = {key: value for key, value in said.items() if value != known[key] or key in _ALWAYS}
        if section != usual:
            lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in keys.items())]
    lines += ["", "[cost]", *(f"{key} = {_value(value)}" for key, value in config.cost.items())]
    return "\n".join(lines) + "\n"


def _host_lines(fleet: PlannedFleet) -> list[str]:
    """How to start the hosts, group by group. Nothing for a worker of the server's own."""
    if is_alone(fleet):
        return []
    return [
        "give the server --host ADDRESS, which hosts reach, and --api-key SECRET; then start, each with a --name, "
        "--api-key SECRET and GPUs of its own (--device cuda:N where several share a node):",
        *(
            f"{group.workers} on {group.option.facts.gpus} x {group.option.stock.hardware.name} each: "
            f"{' '.join(host_command(group, url=f'http://ADDRESS:{HTTP_PORT}'))}"
            for group in fleet.groups
        ),
    ]


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{key} = {_value(each)}" for key, each in items) + "}"
    return msgspec.json.encode(value).decode()
